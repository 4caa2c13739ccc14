"""The page: its files as they are shipped, under a policy that lets nothing else run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: What the page may do: run its own files, and ask this service. No inline script or style, no text that
#: becomes markup, no frame around it, nothing from or to anywhere else.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str


def _read() -> dict[str, File]:
    """Every file of the page by its name. What is asked for is looked up here, and never is a path."""
    found = {}
    for each in files("sessions.service").joinpath("page").iterdir():
        media_type = _TYPES.get(each.name.rpartition(".")[2])
        if media_type is not None:
            content = each.read_bytes()
            found[each.name] = File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


FILES = _read()


@router.get("/")
async def page(request: Request) -> Response:
    return _answer(request, "index.html")


@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    found = FILES.get(name)
    if found is None:
        raise HTTPException(404, "there is no such file of the page")
    headers = {**HEADERS, "etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
