"""Conversations with a model that transformers loaded are kept as any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.errors import FingerprintMismatch, NoChatTemplate, NoCheckpoint
from engine.hosted.host import host
from engine.loader import load_engine
from engine.runner import Engine
from engine.state import SamplerParams
from serialization.manifest import Message
from sessions.api import Ask, Manager
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.restore import Fallback, Reason
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.open import open_store
from tests.engine.hosted import folders
from tests.engine.hosted.models import hosted, ids, said, tiny
from tests.redis_server import RedisServer
from tests.sessions.hosted.continuing import FAMILIES, LINE, digest, engine_of

SETTINGS = EngineConfig(n_ctx=2048, num_cells=8192, num_seqs=4)
SHORT = Ask(max_tokens=8, sampler=SamplerParams(temperature=0.8, seed=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("models") / "my-model")


def load(folder: Path, **given: Any) -> Engine:
    model = AutoModelForCausalLM.from_pretrained(folder, **given)
    return host(model, AutoTokenizer.from_pretrained(folder), SETTINGS)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


# --- conversations --------------------------------------------------------------------------------


def test_a_conversation_goes_on_after_a_restart_as_if_there_had_been_none(
    folder: Path, tmp_path: Path
) -> None:
    with Manager.over(load(folder), tmp_path / "one") as manager, manager.session("tea") as chat:
        whole = [chat.send(text, SHORT).read() for text in ("Green?", "Why?", "And black?")]
    heard = []
    for text in ("Green?", "Why?", "And black?"):
        with Manager.over(load(folder), tmp_path / "two") as manager, manager.session("tea") as chat:
            answer = chat.send(text, SHORT)
            heard.append(answer.read())
            if len(heard) > 1:
                assert answer.restored is not None
                assert answer.restored.reason is Reason.EXACT
                assert answer.restored.recomputed == 0
            assert chat.messages[-1].text == heard[-1]
    assert heard == whole
    assert len(set(heard)) == 3


@pytest.mark.parametrize("family", ["mistral", "bamba"])
def test_edits_forks_and_rewinds_begin_at_the_marks_of_turns(family: str, tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "model", family)
    manager = SessionManager(MemoryStore(), load(folder))
    chat = Conversation.new(manager)
    ask = Reply(max_tokens=6)
    for text in ("one", "two and a half", "three"):
        list(chat.say(text, ask))
    first = [piece.token for piece in chat.edit("four", ask)]
    assert chat.reused is None, "nothing had to be read again"
    assert [piece.token for piece in chat.regenerate(ask)] == first
    chat.close()
    fork = manager.fork(chat.session.id)
    again = Conversation.open(SessionManager(manager.store, load(folder)), fork.id)
    assert again.restored is not None
    assert again.restored.recomputed == 0
    assert [piece.token for piece in again.edit("four", ask)] == first


def test_two_conversations_at_once_do_not_hear_each_other(folder: Path, tmp_path: Path) -> None:
    with Manager.over(load(folder), tmp_path) as manager:
        with manager.session("a") as one:
            alone = one.send("Tell me.", SHORT).read()
        with manager.session("b") as one, manager.session("c") as two:
            both = iter(one.send("Tell me.", SHORT)), iter(two.send("Something else.", SHORT))
            said_b, said_c = "", ""
            for piece in both[0]:
                said_b += piece
                said_c += next(both[1], "")
    assert said_b == alone
    assert said_c != said_b


def test_text_of_a_person_never_becomes_a_control_token(folder: Path) -> None:
    engine = load(folder)
    assert engine.tokenizer.end_ids == {257}
    assert not {256, 257, 258} & set(engine.tokenizer.encode("<|end|><|turn|>assistant\n"))
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hé, wie geht's?"}]
    assert engine.template is not None
    ours = engine.tokenizer.encode_pieces(engine.template.render(messages))
    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


# --- ids alone ------------------------------------------------------------------------------------


def test_sessions_of_ids_need_no_tokenizer(store: MemoryStore) -> None:
    engine = hosted(tiny("llama"))
    manager = SessionManager(store, engine)
    with pytest.raises(NoChatTemplate):
        Conversation.new(manager)
    session = manager.create("run")
    seq = engine.create(SamplerParams(temperature=1.0, seed=2))
    engine.feed(seq, LINE[:300])
    tokens = [piece.token for piece in engine.generate(seq, 5)]
    manager.save(session, seq, [Message("user", "300 ids", 0, 300)])
    tokens += [piece.token for piece in engine.generate(seq, 5)]
    session.close()
    again = SessionManager(store, hosted(tiny("llama")))
    session = again.open("run")
    seq, result = again.resume(session)
    assert (result.reason, result.restored) == (Reason.EXACT, 304)
    assert [piece.token for piece in again.engine.generate(seq, 5)] == tokens[5:]
    session.close()


def test_point_state_can_be_forked_at_its_checkpoints_alone(store: MemoryStore) -> None:
    engine = hosted(tiny("mamba2"))
    manager = SessionManager(store, engine)
    session = manager.create("run")
    seq = engine.create()
    for at in (0, 30):
        engine.feed(seq, LINE[at : at + 30])
        engine.mark(seq)
        manager.save(session, seq, [])
    session.close()
    with pytest.raises(NoCheckpoint, match="cannot be resumed at 45 tokens; the nearest before is 30"):
        manager.fork("run", length=45)
    fork = manager.fork("run", length=30)
    session = manager.open(fork.id)
    resumed, _ = manager.resume(session)
    engine.rewind(seq, 30)
    assert torch.equal(said(engine, seq, ids(6)), said(engine, resumed, ids(6)))
    session.close()


# --- another process ------------------------------------------------------------------------------


@pytest.mark.redis
def test_another_process_goes_on_bit_for_bit_from_disk_and_from_redis(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.client().flushall()
    addresses = [str(tmp_path / "store"), redis_server.url]
    expected = {}
    for family in FAMILIES:
        engine = engine_of(family)
        seq = engine.create()
        engine.feed(seq, LINE)
        for number, address in enumerate(addresses):
            store = open_store(address)
            manager = SessionManager(store, engine)
            session = manager.create(family)
            manager.save(session, seq, [])
            session.close()
            store.close()
            expected[f"{family} {number}"] = ["exact", len(LINE), 0]
        followed = digest(engine, seq)
        for number in range(len(addresses)):
            expected[f"{family} {number}"].append(followed)
    command = [sys.executable, "-m", "tests.sessions.hosted.continuing", *addresses]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


# --- whose rows are whose -------------------------------------------------------------------------


def test_our_engine_and_a_hosted_one_of_the_same_weights_refuse_each_other(
    folder: Path, tmp_path: Path
) -> None:
    ours = load_engine(
        folder, EngineConfig(n_ctx=2048, num_cells=8192, dtype="f32", type_k="f32", type_v="f32")
    )
    engines = {"ours": ours, "theirs": load(folder)}
    for mine, other in (("ours", "theirs"), ("theirs", "ours")):
        store = DiskStore(tmp_path / mine, "default")
        chat = Conversation.new(SessionManager(store, engines[mine]))
        list(chat.say("Hello there", Reply(max_tokens=4)))
        chat.close()
        manager = SessionManager(store, engines[other])
        session = manager.open(chat.session.id)
        with pytest.raises(FingerprintMismatch, match="architecture"):
            manager.resume(session)
        session.close()
        again = Conversation.open(manager, chat.session.id, Fallback.RECOMPUTE)
        assert again.restored is not None
        assert again.restored.reason is Reason.FINGERPRINT
        assert again.restored.restored == 0
        assert again.messages[0].text == "Hello there"
        assert len(list(again.say("And now?", Reply(max_tokens=4)))) == 4
        again.close()
        store.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "bamba"])
def test_another_way_to_compute_attention_is_believed_after_the_canary(
    family: str, store: MemoryStore
) -> None:
    sdpa, eager = tiny(family), tiny(family)
    eager.set_attn_implementation("eager")
    engine = hosted(sdpa)
    session = SessionManager(store, engine).create("run")
    seq = engine.create()
    for at in (0, 25):
        engine.feed(seq, LINE[at : at + 25])
        engine.mark(seq)
    SessionManager(store, engine).save(session, seq, [])
    session.close()
    manager = SessionManager(store, hosted(eager))
    session = manager.open("run")
    _, result = manager.resume(session)
    assert (result.reason, result.restored, result.recomputed) == (Reason.COMPATIBLE, 50, 0)
    assert "attention" in result.detail
    session.close()


def test_what_the_weights_are_can_be_said_by_who_knows() -> None:
    model = tiny("llama")
    named = host(model, weights="sha256:of-my-checkpoint", name="mine")
    assert named.fingerprint.meaning["weights"] == "sha256:of-my-checkpoint"
    assert named.model_name == "mine"
    found = [host(one).fingerprint for one in (model, tiny("llama"), tiny("llama", seed=1))]
    assert found[0] == found[1]
    assert [field for field, _, _ in found[0].differing(found[2])] == ["weights"]
    nearer = host(tiny("llama", rms_norm_eps=1e-3)).fingerprint
    assert [field for field, _, _ in found[0].differing(nearer)] == ["config"]
    louder = host(tiny("own")).fingerprint
    assert [field for field, _, _ in found[0].differing(louder)] == ["architecture"]


def test_a_model_that_was_saved_and_loaded_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    first = AutoModelForCausalLM.from_pretrained(folder)
    first.save_pretrained(tmp_path / "elsewhere")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere", attn_implementation="eager")
    one, other = host(first).fingerprint, host(again).fingerprint
    assert list(one.differing(other)) == []
    assert (one.making["attention"], other.making["attention"]) == ("sdpa", "eager")
