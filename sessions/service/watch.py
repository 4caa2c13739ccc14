"""A service seen from outside: what its /metrics, /health and /v1/models tell of it at one moment."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.parse import urlsplit

from engine.errors import ServiceUnreachable, UsageError

#: More than any service says of itself.
_MOST = 16 * 1024 * 1024
#: What was counted: of each name and its labels the value.
Figures = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True, slots=True)
class Watched:
    """A service at `at` (seconds, of a clock that only goes forward). Tokens, restores and requests are
    counted since it began; speeds are its own moving means, None before the first; `memory` is what the
    process has in RAM, in bytes, where its system tells. `requests` are by class of status ("2xx")."""

    at: float
    status: str
    model: str
    running: int
    waiting: int
    resident: int
    unsaved: int
    prefill_speed: float | None
    decode_speed: float | None
    prompt_tokens: int
    reply_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    restores: Mapping[str, int]
    mean_restore: float | None
    mean_save: float | None
    saved_bytes: int
    save_errors: int
    requests: Mapping[str, int]
    memory: int | None

    @property
    def hit_rate(self) -> float | None:
        """The share of all prompts' tokens that was had from memory or the store; None before the first."""
        return self.restored_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Rates:
    """What a service did each second between two looks at it."""

    seconds: float
    prompt_tokens: float
    reply_tokens: float
    restores: float
    requests: float


def rates(before: Watched, now: Watched) -> Rates | None:
    """None where it began anew between the two looks."""
    seconds = now.at - before.at
    gains = (
        now.prompt_tokens - now.restored_tokens - (before.prompt_tokens - before.restored_tokens),
        now.reply_tokens - before.reply_tokens,
        sum(now.restores.values()) - sum(before.restores.values()),
        sum(now.requests.values()) - sum(before.requests.values()),
    )
    if seconds <= 0 or min(gains) < 0:
        return None
    read, said, restored, answered = (gain / seconds for gain in gains)
    return Rates(seconds, read, said, restored, answered)


class Watch:
    """Looks at the service at `url`, with an operator's `key` where it has keys. It must be that of one
    process: a front would give the figures of another one each time."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 10.0) -> None:
        """Asks nothing yet. Raises UsageError for what is no address of a service."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"not the address of a service: {url!r} (like http://127.0.0.1:8080)")
        self.url = url.rstrip("/")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._timeout = timeout
        # The environment's proxies are not ours to read, and a key follows no redirection.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)

    def look(self) -> Watched:
        """Raises ServiceUnreachable where it does not answer, or not with what a service answers."""
        status = self._json("/health", allowed=(503,)).get("status")
        figures = _parsed(self._get("/metrics").decode("utf-8", "replace"))
        models = self._json("/v1/models").get("data")
        if not isinstance(status, str) or not isinstance(models, list) or not models:
            raise ServiceUnreachable(f"{self.url} does not answer as a service of ours does")
        return _watched(figures, status, str(models[0].get("id")))

    def _json(self, path: str, allowed: tuple[int, ...] = ()) -> dict[str, Any]:
        try:
            found = json.loads(self._get(path, allowed))
        except ValueError as error:
            raise ServiceUnreachable(f"{self.url}{path} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise ServiceUnreachable(f"{self.url}{path} does not answer as a service of ours does")
        return found

    def _get(self, path: str, allowed: tuple[int, ...] = ()) -> bytes:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                data: bytes = answer.read(_MOST)
                return data
        except urllib.error.HTTPError as error:
            with error:
                if error.code in allowed:
                    return error.read(_MOST)
            raise ServiceUnreachable(
                f"{self.url}{path}: {_refusal(error.code)}", status=error.code
            ) from error
        except urllib.error.URLError as error:
            raise ServiceUnreachable(f"{self.url} does not answer: {error.reason}") from error
        except (OSError, HTTPException) as error:
            raise ServiceUnreachable(f"{self.url} does not answer: {error}") from error


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None


def _refusal(status: int) -> str:
    if status in (401, 403):
        return f"status {status}: an operator's API key is needed (tenuto serve --operator TENANT)"
    return f"status {status}"


def _parsed(text: str) -> Figures:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except ValueError as error:
        raise ServiceUnreachable(f"/metrics is not in Prometheus's format: {error}") from error


def _watched(figures: Figures, status: str, model: str) -> Watched:
    def figure(name: str) -> float | None:
        return figures.get((f"tenuto_{name}", ()))

    def count(name: str) -> int:
        return int(figure(name) or 0)

    memory = figures.get(("process_resident_memory_bytes", ()))
    classes: Counter[str] = Counter()
    for labels, value in _labelled(figures, "tenuto_http_requests_total"):
        classes[f"{labels.get('status', '?')[:1]}xx"] += int(value)
    return Watched(
        at=time.monotonic(),
        status=status,
        model=model,
        running=count("turns_running"),
        waiting=count("turns_waiting"),
        resident=count("sessions_resident"),
        unsaved=count("turns_unsaved"),
        prefill_speed=figure("prefill_speed"),
        decode_speed=figure("decode_speed"),
        prompt_tokens=count("prompt_tokens_total"),
        reply_tokens=count("reply_tokens_total"),
        restored_tokens=count("restored_tokens_total"),
        recomputed_tokens=count("recomputed_tokens_total"),
        restores={
            labels.get("reason", "?"): int(value)
            for labels, value in _labelled(figures, "tenuto_restores_total")
        },
        mean_restore=_mean(figure("restore_seconds_sum"), figure("restore_seconds_count")),
        mean_save=_mean(figure("save_seconds_sum"), figure("save_seconds_count")),
        saved_bytes=count("saved_bytes_total"),
        save_errors=count("save_errors_total"),
        requests=dict(sorted(classes.items())),
        memory=None if memory is None else int(memory),
    )


def _labelled(figures: Figures, name: str) -> Iterator[tuple[dict[str, str], float]]:
    for (each, labels), value in figures.items():
        if each == name:
            yield dict(labels), value


def _mean(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None
