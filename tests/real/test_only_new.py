"""A save writes what is new, and a shared past is stored once: on a real model, by blobs and by bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.stores.disk import DiskStore
from tests.text import long_text

pytestmark = pytest.mark.real

SETTINGS = EngineConfig(n_ctx=8192, num_cells=8192, num_seqs=4)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Engine:
    return load_engine(smollm2_path, SETTINGS)


def hear(pieces: object) -> None:
    for _ in pieces:  # type: ignore[attr-defined]
        pass


def files(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_a_short_turn_on_a_long_session_writes_two_chunks_at_most(engine: Engine, tmp_path: Path) -> None:
    manager = SessionManager(DiskStore(tmp_path / "store", "default"), engine)
    seq = engine.create()
    text = engine.tokenizer.encode(long_text() * 2)
    engine.feed(seq, text[:4000])
    engine.decode([seq])
    session = manager.create()
    full = manager.save(session, seq, ())
    before = {ref.blob for ref in manager.manifest(session.id).blobs()}
    for turn in range(8):  # somewhere in these a chunk closes
        engine.feed(seq, text[100 * turn : 100 * turn + 49])
        engine.decode([seq])
        saved = manager.save(session, seq, ())
        after = {ref.blob for ref in manager.manifest(session.id).blobs()}
        assert len(after - before) <= 2
        assert saved.blobs_written <= 3
        assert saved.bytes_written * 7 < full.bytes_written
        before = after
    session.close()
    engine.close(seq)


def test_ten_sessions_store_their_common_instructions_once(
    engine: Engine, smollm2_path: Path, tmp_path: Path
) -> None:
    system = engine.tokenizer.decode(engine.tokenizer.encode(long_text())[:2000])
    root = tmp_path / "store"
    chats = []
    for number in range(10):
        # Every third one comes from an engine that has nothing in memory.
        own = engine if number % 3 else load_engine(smollm2_path, SETTINGS)
        chat = Conversation.new(SessionManager(DiskStore(root, "default"), own), system=system)
        hear(chat.say(f"Question number {number}?", Reply(max_tokens=8)))
        assert chat.reused is not None
        if number:
            assert chat.reused.reason is Reason.PREFIX
            assert chat.reused.restored >= 7 * 256
        chats.append(chat.session.id)
        chat.close()
    manager = SessionManager(DiskStore(root, "default"), engine)
    manifests = [manager.manifest(session) for session in chats]
    for index in range(7):
        assert len({manifest.chunks[index].blobs[0].ref.blob for manifest in manifests}) == 1
    for manifest in manifests:
        common = {ref.blob for ref in manifests[0].blobs()} if manifest is not manifests[0] else set()
        alone = [chunk for chunk in manifest.chunks if chunk.blobs[0].ref.blob not in common]
        assert len(alone) <= 2 or manifest is manifests[0]
    infos = manager.list()
    assert all(info.shared_bytes > 2 * info.own_bytes for info in infos)
    usage = manager.usage()
    assert usage.total == files(root)
    assert usage.rows_bytes < 2.5 * sum(ref.nbytes for ref in manifests[0].blobs())
