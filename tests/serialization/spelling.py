"""Manifests as their maps, and maps as the manifests that a writer of either version makes of them."""

from __future__ import annotations

from typing import Any

from serialization.bodies import pack_body, unpack_body
from serialization.canonical import pack, unpack

OLD = b"tenutoM\x01"
NEW = b"tenutoM\x02"


def record_of(data: bytes) -> dict[str, Any]:
    """The map of a manifest, as it was written."""
    return unpack(data[8:], "test") if data[:8] == OLD else unpack_body(data[8:], "test")


def written(record: object) -> bytes:
    """The manifest with that map, whatever is in it; ... takes a key of it away."""
    if isinstance(record, dict):
        record = {key: value for key, value in record.items() if value is not ...}
    return NEW + pack_body(record)  # type: ignore[arg-type]


def written_as_1(record: dict[str, Any]) -> bytes:
    return OLD + pack(record)


def map_of(data: bytes) -> bytes:
    """The one spelling of a manifest's map."""
    return pack(record_of(data))
