"""A request that is followed is one span, with the stages of its turn in it, and no word of what was said."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cli.output import Output
from cli.tracing import chosen_tracing, wanted_exporter
from engine.errors import ConfigError
from sessions.service.otel import OtelTracing, open_tracing
from sessions.service.tracing import NoTracing
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.hearing import wait_for
from tests.sessions.service.serving import Served, served

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
SECRET = "zanzibar quagmire"
ASKED = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}


class Followed:
    """A service whose spans stay in memory."""

    def __init__(self, at: Served, exporter: InMemorySpanExporter) -> None:
        self.at, self._exporter = at, exporter

    def spans(self, requests: int = 1) -> dict[str, ReadableSpan]:
        """Those of the last request by name, once so many have ended: after an answer was sent."""
        wait_for(
            lambda: sum(span.parent is None or span.kind.name == "SERVER" for span in self._all) >= requests
        )
        last = [span for span in self._all if span.kind.name == "SERVER"][-1]
        assert last.context is not None
        same = [span for span in self._all if span.context and span.context.trace_id == last.context.trace_id]
        return {("request" if span is last else span.name): span for span in same}

    @property
    def _all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


@pytest.fixture
def followed(make_backend: MakeBackend) -> Iterator[Followed]:
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter), "1")
    with served(make_backend(), tracing=tracing) as at:
        yield Followed(at, exporter)
    tracing.close()


def begin(at: Served) -> str:
    session: str = at.client.post("/v1/sessions", json={}).json()["id"]
    return session


@pytest.mark.parametrize("stream", [False, True])
def test_the_stages_of_a_turn_are_spans_in_that_of_its_request(followed: Followed, stream: bool) -> None:
    session = begin(followed.at)
    path = f"/v1/sessions/{session}/messages"
    answer = followed.at.client.post(path, json={**ASKED, "stream": stream}, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    spans = followed.spans(2)
    assert set(spans) == {"request", "restore", "prefill", "decode", "save"}
    request = spans.pop("request")
    assert request.name == "POST /v1/sessions/{session}/messages"
    told = dict(request.attributes or {})
    assert told["tenuto.session"] == session
    assert (told["tenuto.request_id"], told["tenuto.tenant"]) == ("mine", "default")
    assert (told["http.response.status_code"], told["tenuto.reply_tokens"]) == (200, 4)
    for span in spans.values():
        assert span.parent is not None
        assert request.context is not None
        assert span.parent.span_id == request.context.span_id
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time  # type: ignore[operator]
    begins = [spans[stage].start_time for stage in ("restore", "prefill", "decode", "save")]
    assert begins == sorted(begins)  # type: ignore[type-var]
    assert (spans["save"].attributes or {})["tenuto.blobs"] == 2
    assert (spans["prefill"].attributes or {})["tenuto.tokens"] == told["tenuto.prompt_tokens"]
    assert (spans["decode"].attributes or {})["tenuto.finish"] == "length"


def test_a_chat_completion_has_the_same_stages(followed: Followed) -> None:
    assert followed.at.client.post("/v1/chat/completions", json=ASKED).status_code == 200
    assert set(followed.spans()) == {"request", "restore", "prefill", "decode", "save"}
    unkept = {**ASKED, "store": False}
    assert followed.at.client.post("/v1/chat/completions", json=unkept).status_code == 200
    assert set(followed.spans(2)) == {"request", "restore", "prefill", "decode"}


def test_a_request_is_a_part_of_the_trace_that_it_names(followed: Followed) -> None:
    followed.at.client.post("/v1/chat/completions", json=ASKED, headers=TRACEPARENT)
    request = followed.spans()["request"]
    assert request.context is not None
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert followed.at.logged()[0]["trace_id"] == TRACE


def test_the_log_has_the_id_of_a_trace_that_begins_here(followed: Followed) -> None:
    followed.at.client.get("/health")
    context = followed.spans()["request"].context
    assert context is not None
    assert followed.at.logged()[0]["trace_id"] == f"{context.trace_id:032x}"


def test_an_error_is_told_by_its_kind_and_ends_its_stage(followed: Followed) -> None:
    long = {"messages": [{"role": "user", "content": SECRET * 4000}]}
    answer = followed.at.client.post(f"/v1/sessions/{begin(followed.at)}/messages", json=long)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    spans = followed.spans(2)
    assert set(spans) == {"request", "restore", "prefill"}
    assert (spans["request"].attributes or {})["error.type"] == "context_length_exceeded"
    assert (spans["prefill"].attributes or {})["error.type"] == "ContextFull"
    assert spans["prefill"].status.status_code.name == "ERROR"
    assert SECRET not in "".join(span.to_json() for span in spans.values())


def test_no_span_has_a_word_of_what_was_said(followed: Followed) -> None:
    session = begin(followed.at)
    followed.at.client.post(f"/v1/sessions/{session}/messages", json=ASKED)
    text = "".join(span.to_json() for span in followed.spans(2).values())
    assert session in text
    for word in SECRET.split():
        assert word not in text


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (f"00-{TRACE}-{PARENT}-01", TRACE),
        (f"cc-{TRACE}-{PARENT}-00-more", TRACE),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        ('00-";drop-x-01', None),
    ],
)
def test_without_spans_the_log_keeps_the_trace_that_a_request_names(
    at: Served, given: str, kept: str | None
) -> None:
    at.client.get("/health", headers={"traceparent": given})
    assert at.logged()[0].get("trace_id") == kept


# --- a receiver -----------------------------------------------------------------------------


class Receiver(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.taken: list[ExportTraceServiceRequest] = []

    def names(self) -> set[str]:
        return {
            span.name
            for request in self.taken
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


class _Taking(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.taken.append(request)
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to stderr."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_receiver_is_sent_the_spans_over_http(
    make_backend: MakeBackend, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = chosen_tracing(Output(quiet=True, as_json=False))
    with served(make_backend(), tracing=tracing) as at:
        assert at.client.post("/v1/chat/completions", json=ASKED).status_code == 200
        at.logged()
    tracing.close()
    assert receiver.names() == {"POST /v1/chat/completions", "restore", "prefill", "decode", "save"}
    (resource,) = {
        each.SerializeToString() for r in receiver.taken for each in [r.resource_spans[0].resource]
    }
    assert b"mine" in resource
    assert SECRET.encode() not in b"".join(each.SerializeToString() for each in receiver.taken)


def test_a_receiver_that_is_not_there_costs_no_answer(make_backend: MakeBackend) -> None:
    exporter = OTLPSpanExporter("http://127.0.0.1:9/v1/traces", timeout=1)
    tracing = OtelTracing(BatchSpanProcessor(exporter), "1")
    with served(make_backend(), tracing=tracing) as at:
        assert at.client.post("/v1/chat/completions", json=ASKED).status_code == 200
    tracing.close()


# --- asked for, or not ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "exporter"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_the_environment_tells_where_spans_go(
    variables: dict[str, str], exporter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wanted_exporter() == exporter


def test_what_is_not_spoken_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="zipkin"):
        open_tracing("zipkin", "1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        wanted_exporter()


def test_spans_that_cannot_be_sent_are_told_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.delitem(sys.modules, "sessions.service.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert isinstance(chosen_tracing(Output(quiet=False, as_json=False)), NoTracing)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "tenuto[otel]" in said[0]


def test_nothing_of_its_packages_is_imported_where_nobody_asks() -> None:
    """The API alone is there, which the web framework brings."""
    program = (
        "import sys, sessions.service.app, cli.serve, cli.tracing\n"
        "from cli.output import Output\n"
        "cli.tracing.chosen_tracing(Output(quiet=True, as_json=False))\n"
        "print(*[name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not re.findall(r"opentelemetry\.(?:sdk|exporter|proto)\S*", done.stdout)
