"""What is answered instead of what was asked: one table from errors to statuses, one shape of body."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine import errors
from sessions.service.record import record_of

#: The nearest class above an error says the status of its answer.
STATUS: dict[type[errors.TenutoError], int] = {
    errors.TenutoError: 500,
    errors.UsageError: 400,
    errors.ModelError: 500,
    errors.ModelNotFound: 404,
    errors.NoChatTemplate: 400,
    errors.TemplateRefused: 400,
    errors.EngineError: 500,
    errors.ContextFull: 400,
    errors.NoSlot: 503,
    errors.EditRefused: 409,
    errors.StateError: 409,
    errors.StoreError: 503,
    errors.StoreFull: 507,
    errors.IndexDamaged: 500,
    errors.QuotaExceeded: 507,
    errors.SessionError: 409,
    errors.SessionNotFound: 404,
    errors.SessionAmbiguous: 404,
    errors.StaleSession: 412,
    errors.LeaseHeld: 423,
    errors.Busy: 429,
    errors.Draining: 503,
    errors.IdempotencyKeyReused: 409,
    errors.TurnLost: 409,
    errors.KeysError: 500,
    errors.KeyRefused: 401,
    errors.Erased: 404,
}

#: Codes that clients know by another name than that of the error.
_CODES: dict[type[errors.TenutoError], str] = {
    errors.ContextFull: "context_length_exceeded",
    errors.KeyRefused: "invalid_api_key",
    errors.SessionExpired: "expired",
}

#: What is told of `details`, where an error has it: nothing that is not meant for the client.
_TOLD = frozenset(
    {"holder", "until", "fence", "retry_after", "fields", "limit", "size", "supported", "generation", "lost"}
    | {"quota", "used"}
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_HTTP_CODES = {400: "invalid_json", 408: "request_timeout", 404: "no_such_route", 405: "method_not_allowed"}


class ErrorDetail(BaseModel):
    """`code` is one of a fixed set, `type` its family; `param` names the field that is wrong."""

    message: str
    type: str
    code: str
    param: str | None
    details: dict[str, Any] | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


def status_of(error: errors.TenutoError) -> int:
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def code_of(error: errors.TenutoError) -> str:
    cls = type(error)
    return _CODES.get(cls) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


def body_of(error: errors.TenutoError, status: int | None = None) -> dict[str, Any]:
    """The body that tells an error, also in the middle of a stream."""
    details = {name: value for name, value in error.details.items() if name in _TOLD}
    param = error.details.get("param")
    status = status_of(error) if status is None else status
    return _body(status, str(error), code_of(error), param if isinstance(param, str) else None, details)


def refusal(
    status: int, message: str, code: str, param: str | None = None, retry_after: float | None = None
) -> Response:
    """An answer that is no error of ours."""
    answer = JSONResponse(_body(status, message, code, param, {}), status)
    if retry_after is not None:
        answer.headers["retry-after"] = _whole_seconds(retry_after)
    return answer


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route, for its description; those that every route has are added to them."""
    always = (400, 401, 403, 408, 413, 429, 500, 503)
    return {status: {"model": ErrorBody} for status in sorted({*always, *statuses})}


# --- handlers of the application --------------------------------------------------------------


async def tenuto_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.TenutoError)
    status = status_of(error)
    record_of(request.scope).error = code_of(error)
    answer = JSONResponse(body_of(error), status)
    if status in (423, 429, 503):
        wait = error.details.get("retry_after", 1.0)
        answer.headers["retry-after"] = _whole_seconds(wait if isinstance(wait, int | float) else 1.0)
    return answer


async def http_error(request: Request, error: Exception) -> Response:
    """Paths that lead nowhere, methods that they have not, bodies that cannot be parsed."""
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "refused")
    record_of(request.scope).error = code
    answer = refusal(error.status_code, str(error.detail), code)
    answer.headers.update(error.headers or {})
    return answer


async def invalid(request: Request, error: Exception) -> Response:
    """A body or parameter of a wrong shape. What it was is not said back."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    record_of(request.scope).error = "invalid_request"
    where = _path(found["loc"])
    message = f"{where}: {found['msg']}" if where else f"the body: {found['msg']}"
    if not where and found["type"] in ("model_attributes_type", "missing"):
        message = "the body must be a JSON object, sent with content-type: application/json"
    if found["type"] == "json_invalid":
        return refusal(400, "the body is no JSON", "invalid_json")
    code = "unsupported" if found["type"] == "unsupported" else "invalid_request"
    return refusal(400, message, code, where or None)


def _path(loc: Sequence[int | str]) -> str:
    """("body", "messages", 0, "role") -> messages[0].role"""
    path = ""
    for part in loc[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _body(status: int, message: str, code: str, param: str | None, details: dict[str, Any]) -> dict[str, Any]:
    family = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"message": message, "type": family, "code": code, "param": param}
    if details:
        error["details"] = details
    return {"error": error}


def _whole_seconds(seconds: float) -> str:
    return str(max(1, math.ceil(seconds)))
