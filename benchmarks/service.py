"""`tenuto serve` under load, as a process of its own: many clients, and streams beside a long prompt."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import ROOT, english, tell

CLIENTS, SECONDS = 64, 120.0
#: Fewer sequences and cells than sessions, so that idle ones are evicted and come back from the store.
SEQUENCES, CELLS = 24, 16_384
#: Of the clients so many go away in the midst of a reply, or read it slowly.
VANISH, SLOW = 0.15, 0.05
LONG_PROMPT = 4096
STREAMS = (2, 16)
_ROUNDS = 3


def run(model: str, path: Path) -> None:
    few = ("--sequences", str(SEQUENCES), "--cells", str(CELLS), "--ctx", "8192")
    with tempfile.TemporaryDirectory() as folder, serving(path, folder, *few) as service:
        load = asyncio.run(clients(service, CLIENTS, SECONDS))
        tell("service under load", model=model, clients=CLIENTS, seconds=SECONDS, **load.told())
    enough = ("--sequences", "24", "--cells", "49152", "--ctx", "8192")
    with tempfile.TemporaryDirectory() as folder, serving(path, folder, *enough) as service:
        for streams in STREAMS:
            stalls = asyncio.run(beside_prompts(service, streams, LONG_PROMPT, _ROUNDS))
            tell("streams beside a long prompt", model=model, streams=streams, prompt=LONG_PROMPT, **stalls)


@dataclass(frozen=True, slots=True)
class Service:
    """A `tenuto serve` that runs."""

    url: str
    pid: int

    def rss(self) -> int:
        """Bytes that it has in memory now."""
        pages = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(model: Path, store: str, *options: str) -> Iterator[Service]:
    command = [sys.executable, "-m", "cli.main", "serve", "-q", "--model", str(model), "--port", "0"]
    command += ["--store", store, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://\S+", said)
            assert found is not None, f"the service did not start: {said!r}"
            yield Service(found[0], process.pid)
        finally:
            process.terminate()
            process.wait(120)


# --- many clients -------------------------------------------------------------------------------


@dataclass
class Load:
    """What became of all turns: how many, how each ended, and the memory of the service, second by second."""

    ended: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    between: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    recomputed: int = 0
    rss: list[int] = field(default_factory=list)

    def told(self) -> dict[str, object]:
        half = len(self.rss) // 2
        return {
            "turns": self.ended.total(),
            "ended": dict(self.ended),
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else None,
            "tokens_per_s": self.tokens / max(1, len(self.rss)),
            "median_between_tokens_ms": 1000 * statistics.median(self.between or [0.0]),
            "reasons": dict(self.reasons),
            "recomputed": self.recomputed,
            "rss_first_half_MB": max(self.rss[:half]) / 1e6,
            "rss_second_half_MB": max(self.rss[half:]) / 1e6,
        }


async def clients(service: Service, count: int, seconds: float) -> Load:
    """So many clients, each with sessions of its own, for so long."""
    load, stop = Load(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=300, trust_env=False, limits=limits) as client:
        watch = asyncio.create_task(_watch(service, load))
        await asyncio.gather(*(_converse(client, number, stop, load) for number in range(count)))
        watch.cancel()
        health = await client.get("/health")
        if health.status_code != 200:
            load.errors.append(f"health: {health.status_code}")
    return load


async def _watch(service: Service, load: Load) -> None:
    while True:
        load.rss.append(service.rss())
        await asyncio.sleep(1)


async def _converse(client: httpx.AsyncClient, number: int, stop: float, load: Load) -> None:
    chosen = random.Random(number)
    session = await _begin(client)
    while time.monotonic() < stop:
        if chosen.random() < 0.1:  # a new one; the old one stays in the store
            session = await _begin(client)
        words = " ".join(str(chosen.randrange(1000)) for _ in range(chosen.randrange(5, 60)))
        asked = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": chosen.randrange(4, 24),
            "stream": True,
        }
        leaves = chosen.randrange(1, 4) if chosen.random() < VANISH else None
        pause = 0.5 if chosen.random() < SLOW else 0.0
        try:
            load.ended[await _turn(client, session, asked, leaves, pause, load)] += 1
        except (httpx.HTTPError, AssertionError, ValueError) as error:
            load.errors.append(f"{type(error).__name__}: {error}")


async def _begin(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/sessions", json={"sampler": {"temperature": 1.0}})
    assert answer.status_code == 201, answer.text
    session: str = answer.json()["id"]
    return session


async def _turn(
    client: httpx.AsyncClient,
    session: str,
    asked: dict[str, Any],
    leaves: int | None,
    pause: float,
    load: Load,
) -> str:
    """How it ended. A client that `leaves` does so after so many pieces."""
    url, pieces, last, name = f"/v1/sessions/{session}/messages", 0, None, ""
    async with client.stream("POST", url, json=asked) as answer:
        if answer.status_code in (423, 429):  # its own turn before is being saved, or there are too many
            return str(answer.status_code)
        assert answer.status_code == 200, (answer.status_code, await answer.aread())
        load.reasons[answer.headers["x-tenuto-reason"]] += 1
        load.recomputed += int(answer.headers["x-tenuto-recomputed-tokens"])
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "piece":
                now = time.perf_counter()
                if last is not None and not pause:
                    load.between.append(now - last)
                last, pieces = now, pieces + 1
                load.tokens += 1
                if pieces == leaves:
                    return "left"
                await asyncio.sleep(pause)
            elif line.startswith("data: ") and name == "ended":
                ended = json.loads(line.removeprefix("data: "))
                assert ended.get("save_error") is None, ended
                return "whole"
            elif line.startswith("data: ") and name not in ("begun",):
                raise AssertionError(f"{name}: {line}")
    raise AssertionError("a stream without an end")


# --- beside a long prompt -----------------------------------------------------------------------


async def beside_prompts(service: Service, streams: int, length: int, rounds: int) -> dict[str, object]:
    """Times between the tokens of `streams` replies, without and while a prompt of about `length` tokens is
    read, and the ratios of these. Both by turns in one run."""
    text, heard = english(), _Heard([])
    async with httpx.AsyncClient(base_url=service.url, timeout=600, trust_env=False) as client:
        talking = [asyncio.create_task(_talk(client, number, heard)) for number in range(streams)]
        await _until(lambda: len({number for _, number, _ in heard.tokens}) == streams)
        intervals: list[tuple[float, float]] = []
        for turn in range(rounds):
            await _until(heard.more(8 * streams))
            begun = time.perf_counter()
            num_tokens = await _read_long(client, text, length, turn)
            intervals.append((begun, time.perf_counter()))
            await _until(heard.more(8 * streams))
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
    beside = [
        gap for at, _, gap in heard.tokens if any(begun <= at - gap and at <= end for begun, end in intervals)
    ]
    alone = [
        gap for at, _, gap in heard.tokens if all(at < begun or at - gap > end for begun, end in intervals)
    ]
    told: dict[str, object] = {"read": num_tokens, "s": sum(end - begun for begun, end in intervals) / rounds}
    for name, of in (("median", statistics.median), ("p95", _p95)):
        told[f"{name}_alone_ms"], told[f"{name}_beside_ms"] = 1000 * of(alone), 1000 * of(beside)
        told[f"{name}_ratio"] = of(beside) / of(alone)
    return told


@dataclass
class _Heard:
    """Each token of each stream but the first: when it came, of which stream, and how long after the last."""

    tokens: list[tuple[float, int, float]]

    def more(self, count: int) -> Callable[[], bool]:
        until = len(self.tokens) + count
        return lambda: len(self.tokens) >= until


async def _talk(client: httpx.AsyncClient, number: int, heard: _Heard) -> None:
    """Replies without end: the ids that would end one are never chosen."""
    while True:
        asked = {
            "messages": [{"role": "user", "content": f"Tell me of the number {number}, at length."}],
            "max_tokens": 1024,
            "temperature": 1.0,
            "seed": number,
            "logit_bias": {"0": -100, "2": -100},
            "stream": True,
            "store": False,
        }
        last = None
        async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        heard.tokens.append((now, number, now - last))
                    last = now


async def _read_long(client: httpx.AsyncClient, text: str, length: int, turn: int) -> int:
    """Have a prompt read that nobody knows yet. Returns its tokens."""
    begins = text[turn * 5000 :]
    cut = int(length * 4.25)
    asked = {
        "messages": [{"role": "user", "content": f"{time.time_ns()} {begins[:cut]}"}],
        "max_tokens": 1,
        "store": False,
    }
    answer = await client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    num_tokens: int = answer.json()["usage"]["prompt_tokens"]
    return num_tokens


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it never comes"
        await asyncio.sleep(0.01)


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]
