"""`make demo`: a conversation is held, saved, and ended with its process; another process goes on with it.

Nothing is staged: both halves run as processes of their own and meet only in a store on disk. What the
first would have said next is written down before it ends, and the second must say the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cli.fetching import fetch_with_progress
from cli.output import Output, duration, size
from cli.restored import restored_line

ROOT = Path(__file__).parent.parent
MODEL = "smollm2"
NAME = "demo"
#: What the conversation is about: a short story, written for this.
STORY = ROOT / "benchmarks" / "lighthouse.txt"
QUESTIONS = (
    "Who is Marit, and what does she do?",
    "What happened in the storm?",
)
NEXT = "Thank you. Which of the people in the story do you like best, and why?"
MAX_TOKENS = 60


def main() -> int:
    """Both halves, and what they amount to. Returns 1 if the second half said something else."""
    path = fetch_with_progress(MODEL, Output(quiet=False, as_json=False))
    with tempfile.TemporaryDirectory(prefix="tenuto-demo-") as folder:
        print("1. A conversation about a story, in a process of its own\n", flush=True)
        first = _half("first", path, Path(folder))
        print(
            f"\n   That process ({first['pid']}) has ended. What it left: {size(first['stored'])} on disk.\n"
        )
        print("2. Another process goes on with it\n", flush=True)
        second = _half("second", path, Path(folder))
    return _tell(first, second)


def _half(half: str, model: Path, folder: Path) -> dict[str, Any]:
    report = folder / f"{half}.json"
    command = [sys.executable, "-m", "benchmarks.demo", half, str(model), str(folder), str(report)]
    subprocess.run(command, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(report.read_text("utf-8"))
    return found


def _tell(first: dict[str, Any], second: dict[str, Any]) -> int:
    same = first["next"] == second["next"]
    ratio = first["reading"] / second["first_token"]
    print("\n3. What that saved\n")
    print(f"   tokens of the conversation       {second['length']:>10,}")
    print(f"   read for the first time in       {duration(first['reading']):>10}")
    print(f"   tokens read again after that     {second['recomputed']:>10}")
    print(f"   resumed in                       {duration(second['resumed']):>10}")
    print(f"   resumed, to the first new token  {duration(second['first_token']):>10}")
    print(f"   reading / resuming               {ratio:>9,.0f}×")
    print(f"   on disk                          {size(first['stored']):>10}")
    print(f"   same words as without a break    {'yes' if same else 'NO':>10}")
    print("\nYour turn: .venv/bin/tenuto chat      (and, another day: .venv/bin/tenuto chat -c)")
    return 0 if same else 1


def first_half(model: str, folder: Path) -> dict[str, Any]:
    """Hold the conversation, keep it, and write down what would come next."""
    from engine.state import SamplerParams
    from sessions.conversation import Conversation

    manager = _manager(model, folder)
    sampler = SamplerParams(temperature=0.6, top_p=0.9, repeat_penalty=1.1, seed=1)
    chat = Conversation.new(manager, NAME, sampler)
    story = STORY.read_text("utf-8")
    shown = f"<a story of {len(story.split()):,} words> {QUESTIONS[0]}"
    reading = _say(chat, f"{story}\n\n{QUESTIONS[0]}", shown)[1]
    for question in QUESTIONS[1:]:
        reading += _say(chat, question)[1]
    if chat.save_error is not None:
        raise chat.save_error
    stored = manager.usage().total
    chat.pin(NAME)
    say_next = _say(chat, NEXT, quiet=True)[0]
    chat.close()
    return {"reading": reading, "stored": stored, "next": say_next}


def second_half(model: str, folder: Path) -> dict[str, Any]:
    """Open what the first half kept, and go on."""
    from sessions.conversation import Conversation

    manager = _manager(model, folder)
    session = manager.load(NAME)
    started = time.perf_counter()
    chat = Conversation.open(manager, session.id)
    opened = time.perf_counter() - started
    result = chat.restored
    assert result is not None
    print(f"   {restored_line(result)}")
    said, waited = _say(chat, NEXT)
    length = result.restored + result.recomputed
    chat.close()
    return {
        "resumed": opened,
        "recomputed": result.recomputed,
        "first_token": opened + waited,
        "length": length,
        "next": said,
        "reason": asdict(result)["reason"],
    }


def _manager(model: str, folder: Path) -> Any:
    from engine.config import EngineConfig
    from engine.loader import load_engine
    from sessions.manager import SessionManager
    from sessions.stores.open import open_store

    return SessionManager(open_store(str(folder / "store")), load_engine(model, EngineConfig()))


def _say(chat: Any, text: str, shown: str = "", quiet: bool = False) -> tuple[str, float]:
    """Stream one turn. Returns the reply and the seconds until its first token."""
    from sessions.conversation import Reply

    if not quiet:
        print(f"   you:   {shown or text}\n   model: ", end="", flush=True)
    started, waited, said = time.perf_counter(), None, []
    for piece in chat.say(text, Reply(max_tokens=MAX_TOKENS)):
        waited = waited or time.perf_counter() - started
        said.append(piece.text)
        if not quiet:
            print(piece.text.replace("\n", "\n          "), end="", flush=True)
    if not quiet:
        print(flush=True)
    return "".join(said), waited or 0.0


def _run_half(half: str, model: str, folder: str, report: str) -> None:
    import os

    work = {"first": first_half, "second": second_half}[half]
    Path(report).write_text(json.dumps({**work(model, Path(folder)), "pid": os.getpid()}), "utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _run_half(*sys.argv[1:])
    else:
        sys.exit(main())
