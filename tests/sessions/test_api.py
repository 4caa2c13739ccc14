"""The Python API: the same conversation in a thread and in an event loop, as the page about it says."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import (
    ContextFull,
    LeaseHeld,
    NameRefused,
    SealRefused,
    SessionNotFound,
    StaleSession,
    StoreUnavailable,
    UsageError,
)
from engine.shared import SharedEngine
from sessions.api import Ask, ChatMessage, EngineConfig, Manager, Reason, SamplerParams
from sessions.names import new_session_id
from sessions.service.backend import Backend
from sessions.stores.disk import DiskStore
from tests.engine.hosted import folders
from tests.faults import FaultyStore
from tests.sessions.conftest import MakeEngine
from tests.sessions.sealing import NAME, files, found_in, ring

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SAMPLED = SamplerParams(temperature=1.0, seed=5)
SHORT = Ask(max_tokens=12)


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def manager(tiny_path: Path, tmp_path: Path) -> Iterator[Manager]:
    config = EngineConfig(n_ctx=2048, num_cells=8192, num_seqs=8, threads=1, dtype="f32", deterministic=True)
    with Manager.open(tiny_path, tmp_path / "chats", config) as opened:
        yield opened


def test_the_page_does_as_it_says(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").symlink_to(tiny_path)
    folders.write(Path("my-model"))
    assert len(examples()) >= 8
    for number, example in enumerate(examples()):
        names: dict[str, object] = {"__name__": f"example {number}"}
        exec(compile(example, f"example {number} of {PAGE.name}", "exec"), names)  # a page of our own
        if "replies" in names:
            assert len(names["replies"]) == 5  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "0 were read again" in said
    assert "'tea'" in said


def test_both_kinds_of_loop_hear_the_same(manager: Manager) -> None:
    texts = ("hello", "and then?", "why?")
    with manager.session("one", "be brief", SAMPLED) as chat:
        heard = ["".join(chat.send(text, SHORT)) for text in texts]
        messages = chat.messages

    async def talk() -> list[str]:
        found = []
        async with manager.session("two", "be brief", SAMPLED) as chat:
            for text in texts:
                pieces = [piece async for piece in chat.send(text, SHORT)]
                assert all(pieces)
                found.append("".join(pieces))
            assert [m.text for m in await chat.messages()] == [m.text for m in messages]
        return found

    assert asyncio.run(talk()) == heard


def test_tasks_share_a_manager(manager: Manager) -> None:
    async def talk(number: int) -> list[str]:
        async with manager.session(f"task-{number}", sampler=SAMPLED) as chat:
            return [await chat.send(f"turn {turn}", SHORT).aread() for turn in range(3)]

    async def all_of_them() -> list[list[str]]:
        return list(await asyncio.gather(*(talk(number) for number in range(12))))

    found = asyncio.run(all_of_them())
    assert found == [found[0]] * 12


def test_an_answer_tells_what_came_back(manager: Manager) -> None:
    with manager.session() as chat:
        answer = chat.send("hello", SHORT)
        assert (answer.restored, answer.finish, answer.text) == (None, None, "")
        assert answer.read() == answer.text
        assert answer.restored is not None
        assert answer.restored.reason is Reason.NEW
        assert answer.finish in ("length", "eos")
        again = chat.send("more", SHORT)
        again.read()
        assert again.restored is not None
        assert again.restored.recomputed == 0


def test_who_stops_listening_keeps_what_was_heard(manager: Manager) -> None:
    with manager.session(sampler=SAMPLED) as chat:
        answer = chat.send("tell me everything", Ask(max_tokens=500))
        for _ in zip(answer, range(3), strict=False):
            pass
        said = chat.messages[-1].text  # closes it
        assert said == answer.text
        assert chat.send("go on", SHORT).read()
    assert manager.backend.load().running == 0


def test_a_task_that_is_cancelled_ends_its_answer(manager: Manager) -> None:
    async def talk() -> str:
        async with manager.session("long") as chat:
            answer = chat.send("tell me everything", Ask(max_tokens=1900))

            async def listen() -> None:
                async for _ in answer:
                    pass

            task = asyncio.create_task(listen())
            while len(answer.text) < 20:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await answer.aclose()
            return (await chat.messages())[-1].text

    said = asyncio.run(talk())
    assert 10 < len(said) < 1500
    assert manager.backend.load().running == 0


def test_a_block_ends_the_answer_that_is_still_being_said(manager: Manager) -> None:
    async def talk() -> None:
        async with manager.session("long") as chat:
            async for _ in chat.send("tell me everything", Ask(max_tokens=1900)):
                break

    asyncio.run(talk())
    assert manager.backend.load().running == 0
    assert len(manager.backend.get("default", "long").messages) == 2


def test_two_writers_of_one_session_are_told_of_each_other(manager: Manager) -> None:
    with manager.session("s") as one, manager.session("s") as two:
        one.send("first", SHORT).read()
        with pytest.raises(StaleSession):
            two.send("second", SHORT).read()
        assert len(two.refresh().messages) == 2
        two.send("second", SHORT).read()
        with pytest.raises(StaleSession):
            one.rewind()


def test_edits(manager: Manager) -> None:
    with manager.session("s", sampler=SAMPLED) as chat:
        first = chat.send("one", SHORT).read()
        chat.send("two", SHORT).read()
        chat.rewind()
        assert [m.text for m in chat.messages] == ["one", first]
        assert chat.regenerate(SHORT).read() == first
        fork = chat.fork("t")
        chat.edit("another", SHORT).read()
        assert chat.messages[0].text == "another"
    with manager.session("t") as other:
        assert other.id == fork.id
        assert other.messages[0].text == "one"


def test_conversations_that_the_caller_keeps(manager: Manager) -> None:
    messages = [ChatMessage("user", "hello")]
    answer = manager.complete(messages, Ask(max_tokens=12, sampler=SAMPLED))
    messages += [ChatMessage("assistant", answer.read()), ChatMessage("user", "more")]
    again = manager.complete(messages, SHORT)
    again.read()
    assert again.restored is not None
    assert again.restored.restored > 20


def test_sessions_are_named_listed_and_deleted(manager: Manager) -> None:
    with manager.session("a"), manager.session("b"):
        pass
    with manager.session("a") as chat:
        chat.send("hello", SHORT).read()
    assert [view.name for view in manager.list().sessions] == ["b", "a"]
    assert manager.of("another").list().sessions == ()
    manager.delete("a")
    assert [view.name for view in manager.list().sessions] == ["b"]
    with pytest.raises(SessionNotFound), manager.session(new_session_id()):
        pass


def test_the_end_of_a_block_tries_to_save_again_and_says_if_it_cannot(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    store = FaultyStore(DiskStore(tmp_path / "faulty", "default"))
    with Manager(Backend(make_engine(), lambda _: store)) as manager:
        opening = manager.session("s")
        answer = opening.__enter__().send("hello", SHORT)
        next(answer)
        store.plan = "." * store.num_calls + "r" * 10_000
        answer.read()
        assert answer.ended is not None
        assert answer.ended.save_error is not None
        with pytest.raises(StoreUnavailable):
            opening.__exit__(None, None, None)
        store.plan = ""
        with manager.session("s") as chat:
            chat.send("more", SHORT).read()
            assert len(chat.messages) == 4


# --- in an event loop -------------------------------------------------------------------------


def test_two_tasks_on_one_session_never_merge(manager: Manager) -> None:
    """One of them has it; the others are told by an error, and go on from there."""

    async def talk(text: str) -> int:
        tries = 0
        async with manager.session("shared") as chat:
            while True:
                tries += 1
                try:
                    await chat.send(text, SHORT).aread()
                    return tries
                except (LeaseHeld, StaleSession):
                    await asyncio.sleep(0.01)
                    await chat.refresh()

    async def all_of_them() -> list[int]:
        async with manager.session("shared"):
            pass
        return await asyncio.gather(*(talk(f"task {number}") for number in range(4)))

    tries = asyncio.run(all_of_them())
    assert max(tries) > 1
    messages = manager.backend.get("default", "shared").messages
    assert [message.role for message in messages] == ["user", "assistant"] * 4
    assert {message.text for message in messages[::2]} == {f"task {number}" for number in range(4)}


def test_who_sends_while_an_answer_is_said_ends_it(manager: Manager) -> None:
    async def talk() -> None:
        async with manager.session("s") as chat:
            first = chat.send("tell me everything", Ask(max_tokens=1900))
            await anext(first)
            second = await chat.send("that is enough", SHORT).aread()
            assert [piece async for piece in first] == []
            assert first.finish is None
            texts = [message.text for message in await chat.messages()]
            assert texts == ["tell me everything", first.text, "that is enough", second]

    asyncio.run(talk())


class OurFault(Exception):
    pass


def test_an_exception_in_the_block_leaves_the_session_as_it_was_said(manager: Manager) -> None:
    heard: list[str] = []

    async def talk() -> None:
        async with manager.session("async") as chat:
            await chat.send("first", SHORT).aread()
            async for piece in chat.send("second", Ask(max_tokens=1900)):
                heard.append(piece)
                if len(heard) == 3:
                    raise OurFault

    with pytest.raises(OurFault):
        asyncio.run(talk())

    def talk_in_a_thread() -> None:
        with manager.session("sync") as chat:
            chat.send("first", SHORT).read()
            for number, _ in enumerate(chat.send("second", Ask(max_tokens=1900))):
                if number == 2:
                    raise OurFault

    with pytest.raises(OurFault):
        talk_in_a_thread()
    assert manager.backend.load().running == 0
    for name in ("async", "sync"):
        messages = manager.backend.get("default", name).messages
        assert [message.role for message in messages] == ["user", "assistant"] * 2
        assert messages[-1].text == "".join(heard)  # greedy: both heard the same
    with manager.session("async") as chat:
        assert chat.send("third", SHORT).read()


def test_a_time_limit_ends_an_answer_and_keeps_what_was_heard(manager: Manager) -> None:
    async def talk() -> tuple[str, str]:
        async with manager.session("s") as chat:
            answer = chat.send("tell me everything", Ask(max_tokens=1900))
            first = await anext(answer)
            assert first
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await answer.aread()
            await answer.aclose()
            return answer.text, (await chat.messages())[-1].text

    heard, kept = asyncio.run(talk())
    assert kept == heard
    assert manager.backend.load().running == 0


def test_nothing_of_a_conversation_runs_in_the_loops_own_thread(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the loop is never kept waiting, neither by the store nor by the model."""
    ran: dict[str, set[int]] = {}

    def noted(name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            ran.setdefault(name, set()).add(threading.get_ident())
            return verb(*args, **kwargs)

        return called

    verbs = ("get", "create", "turn", "regenerate", "edit", "rewind", "fork", "export", "complete", "load")
    for verb in verbs:
        monkeypatch.setattr(manager.backend, verb, noted(verb, getattr(manager.backend, verb)))
    monkeypatch.setattr(SharedEngine, "feed", noted("feed", SharedEngine.feed))

    async def talk() -> int:
        async with manager.session("s") as chat:
            await chat.send("one", SHORT).aread()
            await chat.regenerate(SHORT).aread()
            await chat.edit("two", SHORT).aread()
            answer = chat.send("three", Ask(max_tokens=500))
            await anext(answer)
            await answer.aclose()
            await chat.view()
            await chat.messages()
            await chat.refresh()
            await chat.rewind()
            await chat.fork()
            await chat.export(io.BytesIO())
        await manager.complete([ChatMessage("user", "hello")], SHORT).aread()
        return threading.get_ident()

    loops_own = asyncio.run(talk())
    assert set(ran) >= {*verbs, "feed"}
    assert [name for name, threads in ran.items() if loops_own in threads] == []


def test_an_answer_at_its_end_stays_there(manager: Manager) -> None:
    async def talk() -> None:
        async with manager.session() as chat:
            answer = chat.send("one", SHORT)
            text = await answer.aread()
            assert [piece async for piece in answer] == []
            await answer.aclose()
            assert (await answer.aread(), answer.read()) == (text, text)

    asyncio.run(talk())
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("answer")]
    deadline = time.monotonic() + 20
    while names and time.monotonic() < deadline:
        time.sleep(0.01)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("answer")]
    assert names == []


def test_an_error_of_a_turn_is_raised_where_it_is_heard(manager: Manager) -> None:
    long = "far too long " * 1000

    async def talk() -> None:
        async with manager.session("s") as chat:
            answer = chat.send(long, SHORT)
            with pytest.raises(ContextFull):
                await answer.aread()
            assert await answer.aread() == ""
            assert await chat.messages() == ()
            assert await chat.send("short", SHORT).aread()

    asyncio.run(talk())
    with manager.session("s") as chat, pytest.raises(ContextFull):
        chat.send(long, SHORT).read()


def test_a_block_is_entered_once(manager: Manager) -> None:
    opening = manager.session("s")
    with opening, pytest.raises(UsageError), opening:
        pass
    with pytest.raises(UsageError), opening:
        pass


def test_who_is_given_another_tenants_conversations_cannot_end_the_model(manager: Manager) -> None:
    of_ann = manager.of("ann")
    assert not isinstance(of_ann, Manager)
    with of_ann.session("s") as chat:
        chat.send("hello", SHORT).read()
    assert manager.list().sessions == ()
    assert [view.name for view in of_ann.list().sessions] == ["s"]
    with pytest.raises(NameRefused), manager.of("../ann").session("s"):
        pass


# --- sealed -----------------------------------------------------------------------------------


def test_a_sealed_store_has_nothing_that_can_be_read(tiny_path: Path, tmp_path: Path) -> None:
    config = EngineConfig(n_ctx=2048, num_cells=4096, num_seqs=4, threads=1, dtype="f32")
    store = tmp_path / "chats"
    keyring = ring(tmp_path / "keys")
    with Manager.open(tiny_path, store, config, keyring=keyring) as sealed, sealed.session(NAME) as chat:
        chat.send("a marmalade sandwich, please", SHORT).read()
    found = found_in(files(store), {"text": b"marmalade", "name": NAME.encode(), "frame": b"tenutoB"})
    assert found == set()
    with Manager.open(tiny_path, store, config, keyring=keyring) as sealed, sealed.session(NAME) as chat:
        assert len(chat.messages) == 2
    with pytest.raises(SealRefused):
        Manager.open(tiny_path, store, config)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("driver")] == []


# --- as a user's tools see it -----------------------------------------------------------------


def test_it_needs_no_package_of_the_service() -> None:
    without = "; ".join(
        [
            "import sys",
            "sys.modules.update(dict.fromkeys(['fastapi', 'starlette', 'uvicorn', 'prometheus_client']))",
            "import sessions.api",
        ]
    )
    subprocess.run([sys.executable, "-c", without], check=True, cwd=PAGE.parents[1])


@pytest.mark.slow
def test_the_examples_and_a_users_program_have_types(tmp_path: Path) -> None:
    """By `mypy --strict`, from outside, with what is shipped."""
    for number, example in enumerate(examples()):
        (tmp_path / f"example_{number}.py").write_text(example)
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    options = ("--strict", "--follow-imports", "silent", "--cache-dir", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "mypy", *options, "."]
    environment = {**os.environ, "MYPYPATH": str(PAGE.parents[1])}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    errors = [line for line in told.splitlines() if "error:" in line]
    assert {line.split(":")[0] for line in errors} == {"wrong.py"}, told
    wrong = [number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")]
    assert [int(line.split(":")[1]) for line in errors] == wrong, told


RIGHT = """
import asyncio

from sessions.api import Answer, Ask, AsyncChat, Chat, ChatMessage, Manager, RestoreResult


def sync(manager: Manager) -> str:
    with manager.session("s", system="Be brief.") as chat:
        typed: Chat = chat
        texts: list[str] = [piece for piece in typed.send("hello", Ask(max_tokens=3))]
        roles: list[str] = [message.role for message in chat.messages]
        return "".join(texts + roles)


async def in_a_loop(manager: Manager) -> str:
    async with manager, manager.session() as chat:
        typed: AsyncChat = chat
        answer: Answer = typed.send("hello")
        async for piece in answer:
            print(piece.upper())
        restored: RestoreResult | None = answer.restored
        print(restored.reason.value if restored else "")
        return await manager.complete([ChatMessage("user", "hello")]).aread()


asyncio.run(in_a_loop(Manager.open("model.gguf", "chats")))
"""

WRONG = """
from sessions.api import Ask, Manager

manager = Manager.open("model.gguf", "chats", tenant=3)  # wrong
with manager.session("s") as chat:
    number: int = chat.send("hello").read()  # wrong
    chat.send("hello", Ask(max_token=3))  # wrong
    chat.say("hello")  # wrong
"""
