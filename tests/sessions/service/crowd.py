"""Clients of a service, many at once: each has a conversation, and says one thing after the other in it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

#: Statuses that say: later.
_LATER = (423, 429, 503)
#: What a turn is told that was not saved, since a failover lost its lease, or the turn before it.
_LOST = ("lease_lost", "turn_lost", "stale_session")


@dataclass(frozen=True)
class Crowd:
    """`conversations` of `turns` each, `at_once` of them; a turn is given up after `limit` seconds."""

    conversations: int
    turns: int
    at_once: int = 16
    limit: float = 120.0
    max_tokens: int = 6

    def question(self, conversation: int, turn: int) -> str:
        return f"{turn}: of {conversation}?"

    def body(self, conversation: int, turn: int) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self.question(conversation, turn)}],
            "max_tokens": self.max_tokens,
        }


@dataclass
class Heard:
    """What came of it: replies by conversation, in order; why turns were asked for again; how long each
    took; and the generation that each acknowledged turn was."""

    replies: dict[str, list[str]] = field(default_factory=dict)
    generations: dict[str, list[int]] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    turns: int = 0

    def wait_for(self, turns: int) -> None:
        """Until so many turns were acknowledged: then what is done comes in the way of others."""
        until = time.monotonic() + 60
        while self.turns < turns and time.monotonic() < until:
            time.sleep(0.005)

    def slowest(self) -> float:
        return max(self.seconds)


def talk(url: str, crowd: Crowd, heard: Heard | None = None) -> Heard:
    """All of the crowd's turns, each asked for until it was acknowledged: said, and saved. `heard` grows
    meanwhile."""
    heard = heard or Heard()
    asyncio.run(_talk(url, crowd, heard))
    return heard


async def _talk(url: str, crowd: Crowd, heard: Heard) -> None:
    places = asyncio.Semaphore(crowd.at_once)
    limits = httpx.Limits(max_keepalive_connections=0)  # every request to whichever worker comes next
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as client:

        async def one(number: int) -> None:
            async with places:
                await _conversation(client, crowd, number, heard)

        async with asyncio.TaskGroup() as group:
            for number in range(crowd.conversations):
                group.create_task(one(number))


async def _conversation(client: httpx.AsyncClient, crowd: Crowd, number: int, heard: Heard) -> None:
    name = f"talk-{number}"
    sampler = {"temperature": 1.0, "seed": number}
    await _until_there(client, {"name": name, "sampler": sampler}, crowd, heard)
    heard.replies[name], heard.generations[name] = [], []
    for turn in range(crowd.turns):
        started = time.monotonic()
        answer = await _until(
            client,
            f"/v1/sessions/{name}/messages",
            crowd.body(number, turn),
            {"idempotency-key": f"{number}/{turn}"},
            (200,),
            crowd,
            heard,
        )
        heard.seconds.append(time.monotonic() - started)
        heard.reasons[answer["restored"]["reason"]] += 1
        heard.replies[name].append(answer["reply"]["content"])
        heard.generations[name].append(answer["saved"]["generation"])
        heard.turns += 1


async def _until_there(client: httpx.AsyncClient, body: dict[str, Any], crowd: Crowd, heard: Heard) -> None:
    """Begin a session. A name is taken by the attempt that failed, too, until its lease ends."""
    until = time.monotonic() + crowd.limit
    while True:
        await _until(client, "/v1/sessions", body, {}, (201, 409), crowd, heard)
        try:
            if (await client.get(f"/v1/sessions/{body['name']}")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < until, "it never comes"
        await asyncio.sleep(0.1)


async def _until(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    done: tuple[int, ...],
    crowd: Crowd,
    heard: Heard,
) -> dict[str, Any]:
    """The answer that acknowledges, asked for again while there is none, as such clients do."""
    until = time.monotonic() + crowd.limit
    while True:
        why = ""
        try:
            answer = await client.post(path, json=body, headers=headers)
        except httpx.TransportError as error:
            why = type(error).__name__
        else:
            said: dict[str, Any] = answer.json()
            if answer.status_code in done:
                why = (said.get("save_error") or {}).get("code", "")
                if not why:
                    return said
            else:
                why = said["error"]["code"]
                assert answer.status_code in _LATER or why in _LOST, (answer.status_code, said)
        heard.again[why] += 1
        assert time.monotonic() < until, f"it never comes: {why}"
        await asyncio.sleep(0.1)


def read(url: str, crowd: Crowd) -> dict[str, list[tuple[str, str]]]:
    """Every conversation as it is stored: roles and texts."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        return {
            name: [(message["role"], message["content"]) for message in _get(client, name)["messages"]]
            for name in (f"talk-{number}" for number in range(crowd.conversations))
        }


def _get(client: httpx.Client, name: str) -> dict[str, Any]:
    answer = client.get(f"/v1/sessions/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(crowd: Crowd, heard: Heard) -> dict[str, list[tuple[str, str]]]:
    """What must be stored if nothing was lost, and nothing doubled."""
    stored: dict[str, list[tuple[str, str]]] = {}
    for number in range(crowd.conversations):
        name = f"talk-{number}"
        stored[name] = []
        for turn, reply in enumerate(heard.replies[name]):
            stored[name] += [("user", crowd.question(number, turn)), ("assistant", reply)]
    return stored
