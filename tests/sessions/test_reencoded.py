"""Sessions that were stored anew, with other dtypes, codecs, chunks, windows or keys, go on in an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.errors import FingerprintMismatch
from engine.runner import Engine
from engine.state import Provenance, SeqId
from serialization.blobs import is_sealed
from serialization.manifest import Manifest
from serialization.reencode.reencode import reencode
from serialization.reencode.reencoding import Reencoding, Windows
from serialization.resume import can_resume_at, resumable_lengths
from sessions.conversation import Conversation, Reply
from sessions.keyring.keyset import Scope
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.prefix import PrefixIndex
from sessions.reduce import tombstone
from sessions.restore import Reason
from sessions.stores.base import StoreConfig
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.sealing import sealed_store
from tests.engine.parallel.threads import divided
from tests.exact.members import MEMBERS, folder, open_member
from tests.exact.running import forget, go_on
from tests.oracles import base
from tests.sessions.conftest import MakeEngine
from tests.sessions.sealing import ring

#: tokens of a tiny model's session: one chunk and a piece
LENGTH = 400
SETTINGS = {"n_ctx": 1024, "num_cells": 4096, "checkpoint_every": 128}
MORE = base.tokens(5, 8)
SHORT = Reply(max_tokens=12)
POLICY = Policy(lease=5, grace=10)


def saved(manager: SessionManager, length: int = LENGTH) -> tuple[Manifest, SeqId]:
    """A session of so many tokens, in two turns, and the live sequence."""
    engine = manager.engine
    session, seq = manager.create(), engine.create()
    for start, stop in ((0, length // 2), (length // 2, length)):
        engine.feed(seq, base.tokens(3, length)[start:stop])
        manager.save(session, seq, ())
    assert session.manifest is not None
    session.close()
    return session.manifest, seq


def begun(manager: SessionManager, manifest: Manifest) -> str:
    """`manifest` as a session of the manager's store."""
    session = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    manager.commits.begin(manifest, None, None, session)
    return session


def resumed(manager: SessionManager, ref: str) -> SeqId:
    """All of its rows came back, and none was computed again."""
    session = manager.open(ref)
    seq, result = manager.resume(session)
    session.close()
    assert (result.reason, result.recomputed) == (Reason.EXACT, 0)
    return seq


def logits(engine: Engine, seq: SeqId) -> torch.Tensor:
    return torch.stack(go_on(engine, seq, MORE))


LOSSLESS = (
    Reencoding(codec="raw"),
    Reencoding(codec="default", level=9),
    Reencoding(chunk_tokens=64),
    Reencoding(chunk_tokens=4096, codec="fast"),
    Reencoding(windows=Windows.NEEDED),
)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v4", "recurrent_gemma", "qwen4_exp"])
def test_without_loss_it_goes_on_bit_for_bit(family: str) -> None:
    engine = open_member(family, "bf16", **SETTINGS)
    manager = SessionManager(MemoryStore(), engine, POLICY)
    manifest, seq = saved(manager)
    live = logits(engine, seq)
    forget(engine, seq)
    for wanted in LOSSLESS:
        other = SessionManager(MemoryStore(), engine, POLICY)
        seq = resumed(other, begun(other, reencode(manager.store, manifest, other.store, wanted)))
        assert torch.equal(logits(engine, seq), live), wanted
        forget(engine, seq)


#: How far the logits of tiny random models may move, of a deviation of about 1, at the step that moves least:
#: where experts or rows are chosen, a choice that was a near thing may fall otherwise.
DRIFT = {"f32": 0.002, "q8_0": 0.03}


@pytest.mark.parametrize("family", [name for name, member in MEMBERS.items() if len(member.dtypes) > 1])
def test_with_loss_it_goes_on_in_an_engine_of_the_new_dtype(family: str) -> None:
    """Its rows are those that were made, bit for bit; what is said drifts, and no more than that."""
    engine = open_member(family, "bf16", **SETTINGS)
    manager = SessionManager(MemoryStore(), engine, POLICY)
    manifest, seq = saved(manager)
    live = logits(engine, seq)
    for dtype in ("f32", "q8_0"):
        target = SessionManager(MemoryStore(), open_member(family, dtype, **SETTINGS), POLICY)
        made = reencode(manager.store, manifest, target.store, Reencoding(dtype, dtype), engine.form)
        (loss,) = made.reencoded
        assert loss.is_exact == (dtype == "f32")
        ref = begun(target, made)
        seq = resumed(target, ref)
        moved = float((logits(target.engine, seq) - live).abs().amax(1).min())
        assert moved < DRIFT[dtype] * float(live.std()), f"{family}, {dtype}: {moved:.2g}"
        assert target.engine.spans(seq)[0].provenance is Provenance.REENCODED
        with pytest.raises(FingerprintMismatch, match=r"type_k|rotated_k"):
            manager.engine.restore(target.engine.snapshot(seq))
        # rows came in as they are stored
        seq = resumed(target, ref)
        session = target.create()
        target.save(session, seq, ())
        assert session.manifest is not None
        assert {blob.ref.blob for chunk in session.manifest.chunks for blob in chunk.blobs} <= {
            ref.blob for ref in made.blobs()
        }


@pytest.fixture
def chat(make_engine: MakeEngine, store: DiskStore) -> Conversation:
    """A conversation of more than a chunk, rows in bf16."""
    chat = Conversation.new(SessionManager(store, make_engine(), POLICY))
    for text in ("what is the hatter's hat made of? " * 12, "and the rest?"):
        list(chat.say(text, SHORT))
    chat.close()
    return chat


def converted(store: DiskStore, engine: Engine, ref: str, wanted: Reencoding) -> Manifest:
    """The session's next turn is what it was, re-encoded in its own store."""
    manager = SessionManager(store, engine, POLICY)
    session = manager.open(ref)
    manager.commits.follow(session, reencode(store, session.stored().manifest, store, wanted, engine.form))
    session.close()
    return manager.manifest(ref)


def test_a_converted_session_goes_on_and_says_what_it_lost(
    chat: Conversation, make_engine: MakeEngine, store: DiskStore
) -> None:
    before = SessionManager(store).manifest(chat.session.id)
    made = converted(store, make_engine(), chat.session.id, Reencoding("q8_0", "q8_0"))
    manager = SessionManager(store, make_engine(type_k="q8_0", type_v="q8_0"), POLICY)
    again = Conversation.open(manager, chat.session.id)
    assert again.restored is not None
    assert (again.restored.reason, again.restored.recomputed) == (Reason.EXACT, 0)
    assert again.restored.detail == "its rows were re-encoded, bf16 to q8_0"
    list(again.say("go on", SHORT))
    again.close()
    after = manager.manifest(chat.session.id)
    assert after.reencoded == made.reencoded
    assert [(span.start, span.stop, span.provenance) for span in after.spans] == [
        (0, before.length, Provenance.REENCODED),
        (before.length, after.length, Provenance.COMPUTED),
    ]
    fork = manager.fork(chat.session.id)
    assert manager.manifest(fork.id).reencoded == made.reencoded
    assert manager.check().problems == ()
    assert tombstone(replace(after, chunk_tokens=64)).features == ()


def test_converted_rows_are_nobody_elses(
    chat: Conversation, make_engine: MakeEngine, store: DiskStore
) -> None:
    before = SessionManager(store).manifest(chat.session.id)
    index = PrefixIndex(store, "default")
    assert index.find(before.fingerprint, before.tokens) is not None
    made = converted(store, make_engine(), chat.session.id, Reencoding("q8_0", "q8_0"))
    manager = SessionManager(store, make_engine(type_k="q8_0", type_v="q8_0"), POLICY)
    again = Conversation.open(manager, chat.session.id)
    list(again.say("go on", SHORT))
    again.close()
    for fingerprint in (before.fingerprint, made.fingerprint):
        assert index.find(fingerprint, manager.manifest(chat.session.id).tokens) is None


def test_what_was_read_again_has_lost_nothing(
    chat: Conversation, make_engine: MakeEngine, store: DiskStore
) -> None:
    converted(store, make_engine(), chat.session.id, Reencoding("q8_0", "q8_0"))
    manager = SessionManager(store, make_engine(type_k="q8_0", type_v="q8_0"), POLICY)
    manager.release_rows(chat.session.id)
    assert manager.manifest(chat.session.id).reencoded
    again = Conversation.open(manager, chat.session.id)
    list(again.say("go on", SHORT))
    again.close()
    after = manager.manifest(chat.session.id)
    assert after.reencoded == ()
    assert {span.provenance for span in after.spans} == {Provenance.COMPUTED}


def test_a_session_keeps_the_size_of_its_chunks_and_shares_its_past(
    chat: Conversation, make_engine: MakeEngine, store: DiskStore
) -> None:
    """Turns, forks and rewinds of it, and another session that begins alike."""
    made = converted(store, make_engine(), chat.session.id, Reencoding(chunk_tokens=64))
    manager = SessionManager(store, make_engine(), POLICY)
    again = Conversation.open(manager, chat.session.id)
    list(again.say("go on", SHORT))
    again.close()
    after = manager.manifest(chat.session.id)
    assert (made.chunk_tokens, after.chunk_tokens) == (64, 64)
    whole = [chunk for chunk in made.chunks if chunk.stop - chunk.start == 64]
    assert list(after.chunks[: len(whole)]) == whole
    assert manager.rewind(chat.session.id).length < after.length
    assert manager.manifest(manager.fork(chat.session.id).id).chunk_tokens == 64
    hit = manager.known_prefix(made.tokens)
    assert hit is not None
    assert hit.length >= 256
    engine = make_engine()
    other = SessionManager(store, engine, POLICY)
    session = other.create()
    seq, length = other.seed(other.open(hit.session), made.tokens, made.sampler)
    engine.feed(seq, made.tokens[length:])
    other.save(session, seq, ())
    assert session.manifest is not None
    assert (session.manifest.chunk_tokens, length) == (256, hit.length)
    session.close()
    assert other.check().problems == ()


def expect_cut_to_go_on(manager: SessionManager, manifest: Manifest, seq: SeqId, at: int) -> None:
    """What is stored, cut to `at` tokens, says next what the live sequence does that goes back to there."""
    engine = manager.engine
    engine.rewind(seq, at)
    live = logits(engine, seq)
    forget(engine, seq)
    other = SessionManager(MemoryStore(), engine, POLICY)
    seq = resumed(other, begun(other, reencode(manager.store, manifest, other.store, Reencoding(cut=at))))
    assert torch.equal(logits(engine, seq), live)


@pytest.mark.parametrize("at", [1, 200, 256, 300])
def test_cut_it_goes_on_as_if_it_had_been_no_longer(at: int) -> None:
    engine = open_member("llama", "bf16", **SETTINGS)
    manager = SessionManager(MemoryStore(), engine, POLICY)
    manifest, seq = saved(manager)
    expect_cut_to_go_on(manager, manifest, seq, at)


def test_cut_at_a_checkpoint_a_recurrent_session_goes_on() -> None:
    engine = open_member("falcon_h1", "bf16", **SETTINGS)
    manager = SessionManager(MemoryStore(), engine, POLICY)
    manifest, seq = saved(manager)
    at = manifest.checkpoints[0].position
    assert 0 < at < manifest.length
    assert not can_resume_at(manifest, at + 1)
    expect_cut_to_go_on(manager, manifest, seq, at)


def test_without_window_rows_of_earlier_turns_only_the_end_is_gone_on_from() -> None:
    engine = open_member("gemma3", "bf16", **SETTINGS)
    manager = SessionManager(MemoryStore(), engine, POLICY)
    manifest, _ = saved(manager)
    assert can_resume_at(manifest, LENGTH // 2)
    made = reencode(manager.store, manifest, manager.store, Reencoding(windows=Windows.NEEDED))
    assert not can_resume_at(made, LENGTH // 2)
    assert [each[-1] for each in resumable_lengths(made)] == [0, LENGTH]


# --- keys ---------------------------------------------------------------------------------------


def test_sealed_opened_and_sealed_for_another_tenant_it_is_the_same(tmp_path: Path) -> None:
    engine = open_member("gemma3", "bf16", **SETTINGS)
    clear = MemoryStore()
    manager = SessionManager(clear, engine, POLICY)
    manifest, seq = saved(manager)
    live = logits(engine, seq)
    forget(engine, seq)
    keys = ring(tmp_path / "keys")
    ours = sealed_store(MemoryStore(), keys, "default", StoreConfig())
    theirs = sealed_store(MemoryStore(), keys, "other", StoreConfig())
    sealed = reencode(clear, manifest, ours, Reencoding())
    moved = reencode(ours, sealed, theirs, Reencoding(chunk_tokens=64))
    opened = reencode(theirs, moved, clear, Reencoding(codec=POLICY.codec, chunk_tokens=256))
    assert all(is_sealed(ref.blob) for made in (sealed, moved) for ref in made.blobs())
    assert not {ref.blob for ref in sealed.blobs()} & {ref.blob for ref in moved.blobs()}
    assert opened == manifest
    assert reencode(ours, sealed, clear, Reencoding()) == manifest
    each = sealed_store(MemoryStore(), ring(tmp_path / "each", Scope.SESSION), "default", StoreConfig())
    own = each.scoped(manifest.session)
    assert reencode(own, reencode(ours, sealed, own, Reencoding()), clear, Reencoding()) == manifest
    with pytest.raises(Exception, match="blob"):
        reencode(ours, moved, clear, Reencoding())
    other = SessionManager(theirs, engine, POLICY, tenant="other")
    seq = resumed(other, begun(other, replace(moved, tenant="other")))
    assert torch.equal(logits(engine, seq), live)


# --- ranks --------------------------------------------------------------------------------------


def test_what_is_stored_does_not_depend_on_ranks_so_that_nothing_is_to_be_converted() -> None:
    """Saved by two, it is resumed by one, and the other way, and every row stays what it was."""
    store = MemoryStore()
    manifests: dict[int, Manifest] = {}
    with divided(folder("llama"), 2, **SETTINGS) as engine:
        manifests[2], _ = saved(SessionManager(store, engine, POLICY))
    alone = base.open_engine(folder("llama"), **SETTINGS)
    manifests[1], _ = saved(SessionManager(store, alone, POLICY))
    assert manifests[1].layout == manifests[2].layout
    assert manifests[1].fingerprint.meaning == manifests[2].fingerprint.meaning
    assert _again(store, alone, manifests[2]) == manifests[2].chunks
    with divided(folder("llama"), 2, **SETTINGS) as engine:
        assert _again(store, engine, manifests[1]) == manifests[1].chunks


def _again(store: MemoryStore, engine: Engine, manifest: Manifest) -> object:
    """The chunks of a session that was resumed and saved as another one."""
    manager = SessionManager(store, engine, POLICY)
    opened = manager.open(manifest.session)
    seq, result = manager.resume(opened)
    opened.close()
    assert (result.reason, result.recomputed) == (Reason.COMPATIBLE, 0)
    session = manager.create()
    manager.save(session, seq, ())
    session.close()
    assert session.manifest is not None
    return session.manifest.chunks
