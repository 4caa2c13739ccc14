"""Whether spans are asked for, as the environment tells: with OpenTelemetry's own variables."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING

from cli.output import Output
from engine.errors import ConfigError

if TYPE_CHECKING:
    from sessions.service.tracing import Tracing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
_OVER_HTTP = "http/protobuf"


def wanted_exporter() -> str | None:
    """Where spans are to go; None where nobody asks for them. Raises ConfigError for a protocol that is not
    spoken."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not exporter and any(os.environ.get(name) for name in _ENDPOINTS):
        exporter = "otlp"
    for name in _PROTOCOLS:
        if exporter == "otlp" and os.environ.get(name, _OVER_HTTP) not in ("", _OVER_HTTP):
            raise ConfigError(f"{name}: spans are sent by {_OVER_HTTP} alone")
    return None if exporter in ("", "none") else exporter


def chosen_tracing(out: Output) -> Tracing:
    """What is asked for, if its packages are there; if not, one line says so. Nothing of OpenTelemetry is
    imported where nobody asks. Raises ConfigError."""
    from sessions.service.tracing import NoTracing

    exporter = wanted_exporter()
    if exporter is None:
        return NoTracing()
    try:
        from sessions.service.otel import open_tracing
    except ModuleNotFoundError:
        out.warn("spans are asked for (OTEL_…), but not sent: pip install 'tenuto[otel]'")
        return NoTracing()
    return open_tracing(exporter, version("tenuto"))
