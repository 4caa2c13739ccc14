"""OpenAI's client over a service that is a process, and another one for the next turn: ended in order, or
killed. What it says, and what it had not to read again, is what one process says that never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.sessions.service.openai.conftest import LETTERS, assistant, cached, user
from tests.sessions.service.test_serve import Process, serving

#: What was said, and how much of the prompt was there already.
Heard = tuple[str, int]


@dataclass
class Story:
    """A client, and what it remembers from step to step."""

    api: Any  # openai.OpenAI
    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)

    def _chat(self, text: str, **more: Any) -> Any:
        self.messages.append(user(text))
        known = {"model": self.model, "max_tokens": 10, "seed": 1, **LETTERS, **more}
        return self.api.chat.completions.create(messages=self.messages, **known)

    def chat(self, text: str) -> Heard:
        reply = self._chat(text)
        said = str(reply.choices[0].message.content)
        self.messages.append(assistant(said))
        return said, cached(reply)

    def chat_streamed(self, text: str) -> Heard:
        chunks = list(self._chat(text, stream=True, stream_options={"include_usage": True}))
        said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        self.messages.append(assistant(said))
        return said, cached_of(chunks[-1].usage)

    def respond(self, name: str, text: str, **more: Any) -> Heard:
        known = {"model": self.model, "max_output_tokens": 16, "extra_body": {"seed": 2}, **more}
        reply = self.api.responses.create(input=text, **known)
        self.ids[name] = reply.id
        assert self.api.responses.retrieve(reply.id).output_text == reply.output_text
        return str(reply.output_text), cached(reply)

    def respond_streamed(self, name: str, text: str, parent: str) -> Heard:
        known = {"model": self.model, "max_output_tokens": 16, "extra_body": {"seed": 2}}
        *events, last = self.api.responses.create(
            input=text, previous_response_id=self.ids[parent], stream=True, **known
        )
        assert last.type in ("response.completed", "response.incomplete")
        self.ids[name] = last.response.id
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        return said, cached(last.response)

    def in_conversation(self, text: str) -> Heard:
        if "conversation" not in self.ids:
            self.ids["conversation"] = self.api.conversations.create().id
        return self.respond("its last", text, conversation=self.ids["conversation"])

    def models(self) -> Heard:
        (model,) = self.api.models.list()
        assert self.api.models.retrieve(model.id).id == model.id
        return model.id, 0


def cached_of(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


Step = Callable[[Story], Heard]
STEPS: list[Step] = [
    lambda story: story.models(),
    lambda story: story.chat("Good morning."),
    lambda story: story.chat_streamed("And then?"),
    lambda story: story.chat("Who says so?"),
    lambda story: story.respond("root", "Once upon a time."),
    lambda story: story.respond("left", "Left?", previous_response_id=story.ids["root"]),
    lambda story: story.respond_streamed("right", "Right?", "root"),
    lambda story: story.respond("leaf", "And on?", previous_response_id=story.ids["left"]),
    lambda story: story.in_conversation("Hello."),
    lambda story: story.in_conversation("Hello again."),
]
#: Before these steps the process is another one.
RESTARTS = (2, 3, 6, 9)
OPTIONS = ("--deterministic", "--dtype", "f32")


@contextmanager
def client(process: Process) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=120) as api:
        yield api


def end_in_order(process: Process) -> None:
    process.terminate()
    assert process.ended() == 0


def kill(process: Process) -> None:
    process.popen.kill()
    process.ended()


def test_restarts_between_turns_change_nothing_but_the_time(tiny_path: Path, tmp_path: Path) -> None:
    """Also one that nobody was told of: what was answered is stored."""
    with serving(tiny_path, tmp_path / "one", *OPTIONS) as process, client(process) as api:
        story = Story(api, "tiny llama")
        unbroken = [step(story) for step in STEPS]
    assert [was_cached for _, was_cached in unbroken[2:4] + unbroken[5:8] + unbroken[9:]].count(0) == 0

    broken: list[Heard] = []
    story = Story(None, "tiny llama")
    parts = zip((0, *RESTARTS), (*RESTARTS, len(STEPS)), strict=True)
    for number, (start, stop) in enumerate(parts):
        with serving(tiny_path, tmp_path / "many", *OPTIONS) as process, client(process) as story.api:
            broken += [step(story) for step in STEPS[start:stop]]
            (end_in_order, kill)[number % 2](process)
    assert broken == unbroken
