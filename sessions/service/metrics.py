"""What the service counts, for Prometheus. A registry of its own: two services in one process each count
for themselves."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sessions.restore import RestoreResult
from sessions.service.backend import Backend
from sessions.service.logs import tenant_hash
from sessions.service.storage import Storage
from sessions.service.sweeper import Swept
from sessions.service.told import Begun, Ended, Told

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Safe from many threads. Labels are of fixed sets: never an id, a name or a path."""

    def __init__(self, backend: Backend, storage: Storage) -> None:
        self._registry = registry = CollectorRegistry()
        self._restores = Counter("tenuto_restores", "Restores, by reason", ["reason"], registry=registry)
        self._restored = Counter("tenuto_restored_tokens", "Tokens not read again", registry=registry)
        self._recomputed = Counter(
            "tenuto_recomputed_tokens", "Tokens that were read again", registry=registry
        )
        self._prompt = Counter("tenuto_prompt_tokens", "Tokens of prompts", registry=registry)
        self._said = Counter("tenuto_reply_tokens", "Tokens that were said", registry=registry)
        self._restore_seconds = Histogram(
            "tenuto_restore_seconds", "How long a restore took", buckets=_SECONDS, registry=registry
        )
        self._save_seconds = Histogram(
            "tenuto_save_seconds", "How long a save took", buckets=_SECONDS, registry=registry
        )
        self._saved_bytes = Counter("tenuto_saved_bytes", "Bytes that saves wrote", registry=registry)
        self._unsaved = Counter("tenuto_save_errors", "Turns that could not be saved", registry=registry)
        self._requests = Counter(
            "tenuto_http_requests", "Requests answered", ["route", "method", "status"], registry=registry
        )
        self._request_seconds = Histogram(
            "tenuto_http_request_seconds", "Until an answer's last byte", ["route"], registry=registry
        )
        self._sweeps = Counter("tenuto_sweeps", "Stores that were swept", ["outcome"], registry=registry)
        self._swept_sessions = Counter(
            "tenuto_swept_sessions", "Sessions that outlived their time", ["what"], registry=registry
        )
        self._swept_blobs = Counter("tenuto_swept_blobs", "Blobs that sweeps deleted", registry=registry)
        self._swept_bytes = Counter("tenuto_swept_bytes", "Bytes of those", registry=registry)
        registry.register(_Now(backend))
        registry.register(_Stored(storage))
        ProcessCollector(registry=registry)  # memory, processor time and open files, where the system tells

    def hear(self, told: Told) -> None:
        """What a turn told."""
        match told:
            case Begun():
                self._prompt.inc(told.prompt_tokens)
                self._restored.inc(told.restored.restored)
                self.restored(told.restored)
            case Ended():
                self._said.inc(sum(reply.num_tokens for reply in told.replies))
                if told.saved is not None:
                    self._save_seconds.observe(told.saved.seconds)
                    self._saved_bytes.inc(told.saved.bytes_written)
                if told.save_error is not None:
                    self._unsaved.inc()

    def restored(self, result: RestoreResult) -> None:
        """A restore, for a prompt or for none: what a prompt had is counted with the prompt."""
        self._restores.labels(result.reason.value).inc()
        self._recomputed.inc(result.recomputed)
        self._restore_seconds.observe(result.seconds)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(route, method, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def swept(self, swept: Swept) -> None:
        """What a sweep of one tenant's store did."""
        result = swept.result
        if result is None:
            self._sweeps.labels("failed").inc()
            return
        self._sweeps.labels("done").inc()
        for what, sessions in (
            ("expired", result.expired),
            ("released", result.released),
            ("skipped", result.skipped),
        ):
            self._swept_sessions.labels(what).inc(len(sessions))
        self._swept_blobs.inc(result.num_blobs)
        self._swept_bytes.inc(result.nbytes)

    def text(self) -> bytes:
        """All of them, in Prometheus's text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """What the backend is doing, asked for when it is told."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        load = self._backend.load()
        for name, text, value in (
            ("turns_running", "Turns that run now", load.running),
            ("turns_waiting", "Turns that wait to run", load.waiting),
            ("sessions_resident", "Sessions in memory that nobody is talking to", load.resident),
            ("turns_unsaved", "Turns in memory that could not be saved yet", load.unsaved),
            ("prefill_speed", "Tokens read a second, a moving mean", load.prefill_speed),
            ("decode_speed", "Tokens said a second, a moving mean", load.decode_speed),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"tenuto_{name}", text, value)
        if (waiting := load.write_back) is not None:
            for name, text, value in (
                ("turns", "Turns that ended and are being saved", waiting.num_turns),
                ("bytes", "Bytes of their rows, before encoding", waiting.nbytes),
                ("seconds", "How long the oldest of them waits", waiting.seconds),
            ):
                yield GaugeMetricFamily(f"tenuto_write_back_{name}", text, value)
            yield CounterMetricFamily(
                "tenuto_written_back", "Turns saved after they ended", waiting.num_saved
            )
            yield CounterMetricFamily(
                "tenuto_write_back_errors",
                "Turns that could not be saved after they ended",
                waiting.num_failed,
            )
        yield CounterMetricFamily("tenuto_batches", "Batches that were computed", load.num_batches)
        yield CounterMetricFamily("tenuto_batch_tokens", "Tokens in all batches", load.num_batch_tokens)


class _Stored(Collector):
    """What tenants have stored; a tenant is called as the log calls it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def collect(self) -> Iterator[Metric]:
        figures = self._storage.figures()
        stored = GaugeMetricFamily(
            "tenuto_stored_bytes", "Bytes that a tenant has in a tier", labels=["tenant", "tier"]
        )
        for tenant, tiers in figures.tiers.items():
            for tier in tiers:
                stored.add_metric([tenant_hash(tenant), tier.kind], tier.nbytes)
        yield stored
        if figures.age is not None:
            yield GaugeMetricFamily("tenuto_stored_age_seconds", "How old these figures are", figures.age)
