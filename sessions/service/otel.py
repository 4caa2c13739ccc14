"""OpenTelemetry: a span for each request, and in it one for each stage of its turn.

Needs the packages of `tenuto[otel]`, and is imported only where spans are asked for. What the SDK takes from
its own environment variables (endpoint, headers, sampler, resource) it takes itself. The provider is our own:
no other library of the process sends spans by it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.errors import ConfigError
from sessions.service.record import Record
from sessions.service.stages import Note, Noted, Stage

EXPORTERS = ("otlp", "console")


class OtelTracing:
    """See `Tracing`."""

    def __init__(self, processor: SpanProcessor, version: str) -> None:
        """Spans go to `processor`, which is closed with this."""
        named = Resource.create({"service.name": "tenuto", "service.version": version})
        # What the environment says of the service goes before.
        self._provider = TracerProvider(resource=named.merge(Resource.create()), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tenuto", version)
        self._from_headers = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str]) -> OtelTrace:
        above = self._from_headers.extract(dict(headers), Context())
        span = self._tracer.start_span("request", above, SpanKind.SERVER)
        return OtelTrace(self._tracer, span)

    def close(self) -> None:
        self._provider.shutdown()


class OtelTrace:
    """See `Trace`."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._context = set_span_in_context(span, Context())

    @property
    def id(self) -> str | None:
        return f"{self._span.get_span_context().trace_id:032x}"

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[Note]:
        span = self._tracer.start_span(stage.value, self._context)

        def note(**noted: Noted) -> None:
            span.set_attributes({f"tenuto.{key}": value for key, value in noted.items()})

        try:
            yield note
        except GeneratorExit:  # who heard it left: that is no error
            raise
        except BaseException as error:  # its kind alone: a message may quote what was said
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            span.end()

    def end(self, record: Record, route: str, method: str, status: int) -> None:
        span = self._span
        span.update_name(f"{method} {route}")
        told: dict[str, Noted | None] = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "error.type": record.error,
            "tenuto.request_id": record.request_id,
            "tenuto.tenant": record.tenant,
            "tenuto.session": record.session,
            "tenuto.reason": None if record.reason is None else record.reason.value,
            "tenuto.prompt_tokens": record.prompt_tokens,
            "tenuto.restored_tokens": record.restored_tokens,
            "tenuto.recomputed_tokens": record.recomputed_tokens,
            "tenuto.reply_tokens": record.reply_tokens,
            "tenuto.saved": record.saved,
        }
        span.set_attributes({key: value for key, value in told.items() if value is not None})
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def open_tracing(exporter: str, version: str) -> OtelTracing:
    """Spans to "otlp" (over HTTP, in the background) or "console" (stderr). Raises ConfigError."""
    match exporter:
        case "otlp":
            return OtelTracing(BatchSpanProcessor(OTLPSpanExporter()), version)
        case "console":
            return OtelTracing(BatchSpanProcessor(ConsoleSpanExporter(out=sys.stderr)), version)
    raise ConfigError(f"traces go to {' or '.join(EXPORTERS)}, not to {exporter!r}")
