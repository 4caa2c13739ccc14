"""One scenario for exact resume, run live in one process and from a store in another.

As a program it is the other process:
    python -m tests.resuming MODEL STORE SETTINGS STEPS SESSION...
resumes every session and prints, as JSON, what each restore said and a digest of every step's logits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.state import SamplerParams, SeqId
from sessions.manager import SessionManager
from sessions.stores.open import open_store

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Saved:
    """A session as it was saved, and the live sequence it was saved from."""

    label: str
    session: str
    seq: SeqId


def save_scenario(manager: SessionManager, text: Sequence[int], cuts: Sequence[int]) -> list[Saved]:
    """Sessions cut at each of `cuts`; a sampled, a forked, a rewound and (where it can be) a shifted one."""
    engine = manager.engine
    saved = [_fed(manager, f"cut at {cut}", text[:cut]) for cut in cuts]
    sampled = SamplerParams(temperature=0.9, top_k=50, top_p=0.95, repeat_penalty=1.1, seed=7)
    saved.append(_fed(manager, "sampled", text[:300], sampled, steps=3))
    source = _fed(manager, "source of the fork", text[:290], steps=7)
    fork = engine.fork(source.seq)
    saved += [source, Saved("fork", manager.fork(source.session).id, fork)]
    saved.append(_rewound(manager, text))
    if engine._memory.refuse_shift() is None:
        saved.append(_shifted(manager, text))
    return saved


def _fed(
    manager: SessionManager,
    label: str,
    tokens: Sequence[int],
    sampler: SamplerParams | None = None,
    steps: int = 0,
) -> Saved:
    seq = manager.engine.create(sampler)
    manager.engine.feed(seq, tokens)
    for _ in range(steps):
        manager.engine.decode([seq])
    session = manager.create()
    manager.save(session, seq, ())
    session.close()
    return Saved(label, session.id, seq)


def _rewound(manager: SessionManager, text: Sequence[int]) -> Saved:
    """Saved, cut back into the middle of a chunk, taken elsewhere, and saved again."""
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, text[:610])
    session = manager.create()
    manager.save(session, seq, ())
    engine.rewind(seq, 530)
    session.cut(530)
    engine.feed(seq, text[100:120])
    manager.save(session, seq, ())
    session.close()
    return Saved("rewound", session.id, seq)


def _shifted(manager: SessionManager, text: Sequence[int]) -> Saved:
    engine = manager.engine
    seq = engine.create()
    engine.feed(seq, text[:500])
    engine.shift(seq, 4, 150)
    session = manager.create()
    manager.save(session, seq, ())
    session.close()
    return Saved("shifted", session.id, seq)


def go_on(engine: Engine, seqs: Sequence[SeqId], steps: int) -> list[list[str]]:
    """Decode all `seqs` together. Returns, for each, its tokens with digests of the logits they were
    chosen from. The first token is alone: some are chosen from logits that were saved, some from new ones."""
    first = engine.decode(seqs)
    told: list[list[str]] = [[str(first[seq])] for seq in seqs]
    for _ in range(steps):
        chosen = engine.decode(seqs)
        for seq, mine in zip(seqs, told, strict=True):
            logits = engine.logits(seq)
            assert logits is not None
            mine.append(f"{chosen[seq]} {blake3(logits.numpy().tobytes()).hexdigest(8)}")
    return told


def resume_all(manager: SessionManager, sessions: Sequence[str], steps: int) -> dict[str, object]:
    restored, seqs = [], []
    for ref in sessions:
        session = manager.open(ref)
        seq, result = manager.resume(session)
        session.close()
        restored.append([result.reason, result.restored, result.recomputed])
        seqs.append(seq)
    return {"restored": restored, "digests": go_on(manager.engine, seqs, steps)}


def in_another_process(
    model: Path, store: str, settings: dict[str, object], steps: int, sessions: Sequence[str]
) -> dict[str, list[list[object]]]:
    """What `resume_all` says in a new process."""
    command = [sys.executable, "-m", "tests.resuming", str(model), store, json.dumps(settings), str(steps)]
    done = subprocess.run([*command, *sessions], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[list[object]]] = json.loads(done.stdout)
    return answer


def main() -> None:
    model, store, settings, steps, *sessions = sys.argv[1:]
    engine = load_engine(model, EngineConfig.from_mapping(json.loads(settings)))
    print(json.dumps(resume_all(SessionManager(open_store(store), engine), sessions, int(steps))))


if __name__ == "__main__":
    main()
