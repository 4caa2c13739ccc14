"""The engine's own values inside a manifest: layout, fingerprint, sampler, canary, spans and token ids.

Each pair of functions turns one value of `engine.state` into its record and back. Readers raise Corrupt,
UnknownFeature or LimitExceeded; what they return satisfies the rules of docs/format.md, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from engine.errors import ConfigError, Corrupt, UnknownFeature
from engine.state import (
    DTYPES,
    Canary,
    Fingerprint,
    Layout,
    PartKind,
    PartSpec,
    Provenance,
    SamplerParams,
    Span,
    Value,
)
from serialization.limits import (
    MAX_AXES,
    MAX_ENTRIES,
    MAX_FINGERPRINT,
    MAX_KEY,
    MAX_LABEL_NBYTES,
    MAX_PARTS,
    MAX_ROW_NBYTES,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    MAX_VALUE_NBYTES,
    MAX_WINDOW,
    refuse_above,
)
from serialization.records import Record, exactly, integer, items, real, text


def layout_record(layout: Layout) -> list[object]:
    return [
        [spec.name, spec.kind.value, spec.layer, spec.dtype, list(spec.shape), spec.block, spec.window]
        for spec in layout
    ]


def read_layout(value: Any) -> Layout:
    return tuple(_read_spec(item) for item in items(value, MAX_PARTS, "layout"))


def _read_spec(value: Any) -> PartSpec:
    name, kind, layer, dtype, axes, block, window = exactly(value, 7, "part")
    kinds = {each.value: each for each in PartKind}
    if text(kind, MAX_KEY, "part: kind") not in kinds:
        raise UnknownFeature(f"part of an unknown kind: {kind!r}")
    if text(dtype, MAX_KEY, "part: dtype") not in DTYPES:
        raise UnknownFeature(f"rows of an unknown dtype: {dtype!r}")
    shape = tuple(integer(axis, MAX_ROW_NBYTES, "part: shape") for axis in items(axes, MAX_AXES, "shape"))
    block = integer(block, MAX_WINDOW, "part: block")
    if not shape or 0 in shape or block < 1 or (block > 1 and kind != PartKind.BLOCK):
        raise Corrupt("layout: a part that cannot be")
    try:
        spec = PartSpec(
            text(name, MAX_LABEL_NBYTES, "part: name"),
            kinds[kind],
            integer(layer, MAX_PARTS, "part: layer"),
            dtype,
            shape,
            block,
            None if window is None else integer(window, MAX_WINDOW, "part: window"),
        )
    except ConfigError as error:
        raise Corrupt(f"layout: {error}") from error
    refuse_above("one row, in bytes", spec.row_nbytes, MAX_ROW_NBYTES)
    return spec


def fingerprint_record(fingerprint: Fingerprint) -> dict[str, object]:
    return {"making": fingerprint.making, "meaning": fingerprint.meaning}


def read_fingerprint(record: Record) -> Fingerprint:
    making, meaning = (_read_half(record.record(key).rest()) for key in ("making", "meaning"))
    record.end()
    return Fingerprint(meaning, making)


def _read_half(values: Mapping[str, Any]) -> dict[str, Value]:
    refuse_above("fingerprint: fields", len(values), MAX_FINGERPRINT)
    half: dict[str, Value] = {}
    for key, value in values.items():
        if isinstance(value, str):
            text(value, MAX_VALUE_NBYTES, "fingerprint: value")
        elif not (value is None or isinstance(value, bool | int)):
            real(value, "fingerprint: value")
        half[text(key, MAX_KEY, "fingerprint: field")] = value
    return half


def sampler_record(sampler: SamplerParams) -> dict[str, object]:
    return {
        "frequency_penalty": float(sampler.frequency_penalty),
        "logit_bias": [[token, float(bias)] for token, bias in sampler.logit_bias],
        "min_p": float(sampler.min_p),
        "penalty_last_n": sampler.penalty_last_n,
        "presence_penalty": float(sampler.presence_penalty),
        "repeat_penalty": float(sampler.repeat_penalty),
        "seed": sampler.seed,
        "temperature": float(sampler.temperature),
        "top_k": sampler.top_k,
        "top_p": float(sampler.top_p),
    }


def read_sampler(record: Record) -> SamplerParams:
    try:
        sampler = SamplerParams(
            temperature=record.real("temperature"),
            top_k=record.integer("top_k", MAX_TOKEN_ID),
            top_p=record.real("top_p"),
            min_p=record.real("min_p"),
            repeat_penalty=record.real("repeat_penalty"),
            presence_penalty=record.real("presence_penalty"),
            frequency_penalty=record.real("frequency_penalty"),
            penalty_last_n=record.integer("penalty_last_n", MAX_TOKENS),
            logit_bias=tuple(_read_bias(item) for item in record.items("logit_bias", MAX_ENTRIES)),
            seed=record.integer("seed", 2**64 - 1),
        )
    except ConfigError as error:
        raise Corrupt(str(error)) from error
    record.end()
    return sampler


def _read_bias(value: Any) -> tuple[int, float]:
    token, bias = exactly(value, 2, "logit bias")
    if type(bias) is not float or math.isnan(bias):
        raise Corrupt("logit bias: not a real number")
    return integer(token, MAX_TOKEN_ID, "logit bias"), bias


def canary_record(canary: Canary | None) -> dict[str, object] | None:
    if canary is None:
        return None
    logits = [float(logit) for logit in canary.logits]
    return {"ids": list(canary.ids), "logits": logits, "position": canary.position}


def read_canary(record: Record | None, length: int) -> Canary | None:
    if record is None:
        return None
    canary = Canary(
        record.integer("position", MAX_TOKENS),
        tuple(integer(item, MAX_TOKEN_ID, "canary") for item in record.items("ids", MAX_ENTRIES)),
        tuple(real(item, "canary") for item in record.items("logits", MAX_ENTRIES)),
    )
    record.end()
    if canary.position > length or len(canary.ids) != len(canary.logits):
        raise Corrupt("canary: beyond the tokens, or not a logit for each id")
    return canary


def spans_record(spans: Iterable[Span]) -> list[object]:
    return [[span.start, span.stop, span.provenance.value] for span in spans]


def read_spans(value: list[Any], length: int) -> tuple[Span, ...]:
    known = {each.value: each for each in Provenance}
    spans: list[Span] = []
    for item in value:
        start, stop, provenance = exactly(item, 3, "span")
        if text(provenance, MAX_KEY, "span") not in known:
            raise UnknownFeature(f"span of an unknown provenance: {provenance!r}")
        start, stop = integer(start, MAX_TOKENS, "span"), integer(stop, MAX_TOKENS, "span")
        before = spans[-1].stop if spans else 0
        if start != before or stop <= start or (spans and spans[-1].provenance == provenance):
            raise Corrupt("spans: a gap, an overlap, or one span in two")
        spans.append(Span(start, stop, known[provenance]))
    if (spans[-1].stop if spans else 0) != length:
        raise Corrupt("spans: they do not cover the tokens")
    return tuple(spans)


def tokens_record(tokens: tuple[int, ...]) -> bytes:
    """A width in one byte, then the ids in that many bytes each, little-endian."""
    try:
        ids = np.array(tokens, "<u4")
    except (OverflowError, ValueError, TypeError) as error:
        raise Corrupt("tokens: an id that is none") from error
    width = _width(ids)
    return bytes([width]) + ids.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def _width(ids: np.ndarray[Any, np.dtype[np.uint32]]) -> int:
    """The fewest bytes, of 2, 3 and 4, that hold every id."""
    largest = int(ids.max()) if len(ids) else 0
    return 2 if largest < 2**16 else 3 if largest < 2**24 else 4


def read_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, bytes) or not value or value[0] not in (2, 3, 4):
        raise Corrupt("tokens: not ids of two, three or four bytes")
    width = value[0]
    count, rest = divmod(len(value) - 1, width)
    if rest:
        raise Corrupt("tokens: cut off")
    refuse_above("tokens", count, MAX_TOKENS)
    wide = np.zeros((count, 4), np.uint8)
    wide[:, :width] = np.frombuffer(value, np.uint8, offset=1).reshape(count, width)
    ids = wide.reshape(-1).view("<u4")
    if _width(ids) != width:
        raise Corrupt("tokens: wider than their ids need")
    return tuple(ids.tolist())
