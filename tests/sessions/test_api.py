"""The Python API: the same conversation in a thread and in an event loop, as the page about it says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import SessionNotFound, StaleSession, StoreUnavailable
from sessions.api import Ask, ChatMessage, EngineConfig, Manager, Reason, SamplerParams
from sessions.names import new_session_id
from sessions.service.backend import Backend
from sessions.stores.disk import DiskStore
from tests.faults import FaultyStore
from tests.sessions.conftest import MakeEngine

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SAMPLED = SamplerParams(temperature=1.0, seed=5)
SHORT = Ask(max_tokens=12)


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
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 6
    for number, example in enumerate(examples):
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
