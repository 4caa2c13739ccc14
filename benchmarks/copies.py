"""What a copy on the device costs, and what it saves where a turn has outgrown a sliding window."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import english, seconds, tell
from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.state import SamplerParams
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.restore import RestoreResult
from sessions.stores.memory import MemoryStore

ROUNDS = 3


def run(model: str, path: Path) -> None:
    """`model` has sliding windows."""
    # A base model of the catalogue has no chat template of its own; what is said does not matter here.
    rooms = {"with": 2**30, "without": 0}
    engines = {
        name: load_engine(
            path, EngineConfig(n_ctx=8192, num_seqs=1, max_batch=256, device_state_bytes=room), "gemma"
        )
        for name, room in rooms.items()
    }
    _copy(model, engines["with"])
    taken: dict[str, list[RestoreResult]] = {name: [] for name in rooms}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            taken[name].append(_taken_back(engine))
    best = {name: min(results, key=lambda result: result.seconds) for name, results in taken.items()}
    tell(
        "a turn that outgrew the window, taken back",
        model=model,
        tokens=best["with"].restored,
        with_copy_s=best["with"].seconds,
        without_s=best["without"].seconds,
        recomputed_with=best["with"].recomputed,
        recomputed_without=best["without"].recomputed,
        ratio=best["without"].seconds / best["with"].seconds,
    )


def _copy(model: str, engine: Engine) -> None:
    seq = engine.create()
    engine.feed(seq, engine.tokenizer.encode(english())[:2000])
    copy_s = seconds(lambda: engine.device_snapshot(seq), 9)
    handle = engine.device_snapshot(seq)
    restore_s = seconds(lambda: engine.device_restore(handle, seq), 9)
    tell(
        "copy on the device",
        model=model,
        tokens=handle.length,
        nbytes=handle.nbytes,
        copy_s=copy_s,
        restore_s=restore_s,
    )
    engine.rewind(seq, 0)
    engine.close(seq)


def _taken_back(engine: Engine) -> RestoreResult:
    """Of two turns the second, which is long enough that nothing of the first one's window is left."""
    text = english()
    endless = tuple((token, float("-inf")) for token in engine.tokenizer.end_ids)
    chat = Conversation.new(SessionManager(MemoryStore(), engine), sampler=SamplerParams(logit_bias=endless))
    for said in (text[:13_000], text[1_000:12_000]):
        for _ in chat.say(said, Reply(max_tokens=4)):
            pass
    result = chat.rewind()
    engine.rewind(chat._seq, 0)  # the next round finds no prefix in memory
    chat.close()
    return result
