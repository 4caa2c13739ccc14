"""Writes the golden files of the format's newest version. Run when it has grown: python -m tests.golden.make

Files that exist are never written again: what an old build wrote must be readable for ever, also where a
build of today would write other bytes (another zstd, another choice of codec). Each kind of file lies in the
folder of its own version.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from engine.state import NextLogits, PartKind, PartSpec, Point, Provenance, Rows, Span, parts_of
from serialization.archive import write_archive
from serialization.brought import Brought, Proven
from serialization.chunks import encode_rows
from serialization.losses import Loss, PartLoss
from serialization.manifest import Manifest, Message
from serialization.pipelines import CODEC_SETS, DEFAULT
from serialization.points import encode_logits, encode_point
from serialization.prefix import VERSIONS, Letter
from serialization.reencode.reencode import reencode
from serialization.reencode.reencoding import Reencoding
from serialization.replies import KeptReply
from serialization.snapshot import write_state
from tests.serialization.states import (
    FOUR_KINDS,
    CountingStore,
    drafted,
    manifest_of,
    row_bytes,
    state_of,
)

FOLDER = Path(__file__).parent
#: one part for each dtype, wide enough that its codec is worth while
LAYOUT = tuple(
    PartSpec(dtype, PartKind.TOKEN, 0, dtype, (64,))
    for dtype in ("bf16", "f16", "f32", "i64", "q8_0", "q5_0", "q4_0")
)
NUM_ROWS = 40
LOGITS = torch.linspace(-4, 4, 99)
LOSSES = (
    Loss(15, (PartLoss("k", 0, "f16", "f32", 0.0, 0.0), PartLoss("k", 3, "f16", "f32", 0.0, 0.0))),
    Loss(15, (PartLoss("v", 0, "f32", "q8_0", 0.0078125, 0.000030517578125),)),
)


def golden_rows() -> Rows:
    """Normal values of scales that differ by channel; quantized rows with a narrow spread of bytes."""
    noise = np.random.default_rng(20_261_129)
    parts = []
    for spec in LAYOUT:
        values = noise.standard_normal((NUM_ROWS, 64)) * np.exp(noise.standard_normal(64))
        floats = torch.from_numpy(values.astype(np.float32))
        match spec.dtype:
            case "bf16":
                raw = floats.bfloat16().view(torch.uint8)
            case "f16":
                raw = floats.half().view(torch.uint8)
            case "f32":
                raw = floats.view(torch.uint8)
            case "i64":
                raw = torch.arange(NUM_ROWS * 64).reshape(NUM_ROWS, 64).view(torch.uint8)
            case _:
                narrow = noise.normal(128, 9, (NUM_ROWS, spec.row_nbytes))
                raw = torch.from_numpy(narrow.astype(np.uint8))
        parts.append(raw.contiguous())
    return Rows(PartKind.TOKEN, 0, NUM_ROWS, tuple(parts))


def golden_blobs() -> Iterator[tuple[str, bytes, bytes]]:
    """Name, content and decoded bytes of rows, point state and logits."""
    rows = golden_rows()
    decoded = b"".join(part.numpy().tobytes() for part in rows.parts)
    for name, codecs in {**CODEC_SETS, "level-19": DEFAULT.at_level(19)}.items():
        data = encode_rows(PartKind.TOKEN, LAYOUT, 0, NUM_ROWS, [rows], codecs)
        yield f"chunk-{name}.blob", data, decoded
    specs = parts_of(FOUR_KINDS, PartKind.POINT)
    point = Point(9, tuple(row_bytes(spec, 9, 10)[0] for spec in specs))
    point_bytes = b"".join(part.numpy().tobytes() for part in point.parts)
    yield "point.blob", encode_point(specs, point, DEFAULT), point_bytes
    yield "logits.blob", encode_logits(LOGITS, 9, DEFAULT), LOGITS.numpy().tobytes()


def golden_sessions() -> dict[str, bytes]:
    """Manifests of every feature, and archives, by name."""
    files: dict[str, bytes] = {}
    plain = state_of(20, edge=NextLogits(LOGITS))
    for name, state in (("session", plain), ("session-draft", drafted(plain, 18, ahead=2))):
        store = CountingStore()
        manifest = manifest_of(state, write_state(store, state, None, 0))
        files[f"{name}.manifest"] = manifest.encode()
        out = io.BytesIO()
        write_archive(out, manifest, store)
        files[f"{name}.tenuto"] = out.getvalue()
    session = Manifest.decode(files["session.manifest"])
    files["session-note.manifest"] = replace(session, note="what else belongs to it").encode()
    brought = Brought("llama.cpp sequence file", Proven.ROWS, loss=0.0, drift=0.04)
    files["session-brought.manifest"] = replace(session, brought=brought).encode()
    files["session-salt.manifest"] = replace(session, salt="b3-" + "0123456789abcdef" * 4).encode()
    said = (Message("user", "why?", 0, 2), Message("assistant", "so", 2, 4))
    replied = replace(
        session,
        messages=said,
        replies=(KeptReply(bytes(range(16)), bytes(range(16, 32)), 3, 1, "eos"),),
    )
    files["session-replies.manifest"] = replied.encode()
    converted = (Span(0, 15, Provenance.REENCODED), Span(15, 20, Provenance.COMPUTED))
    files["session-reencoded.manifest"] = replace(session, spans=converted, reencoded=LOSSES).encode()
    store, early, late = CountingStore(), drafted(state_of(12)), drafted(state_of(20, since=12))
    first = manifest_of(early, write_state(store, early, None, 0))
    pieced = manifest_of(late, write_state(store, late, first, 12, draft_untouched=12))
    files["session-pieces.manifest"] = pieced.encode()
    out = io.BytesIO()
    write_archive(out, pieced, store)
    files["session-pieces.tenuto"] = out.getvalue()
    store, state = CountingStore(), drafted(state_of(150))
    small = reencode(
        store,
        manifest_of(state, write_state(store, state, None, 0)),
        store,
        Reencoding(chunk_tokens=64),
    )
    files["session-chunks.manifest"] = small.encode()
    out = io.BytesIO()
    write_archive(out, small, store)
    files["session-chunks.tenuto"] = out.getvalue()
    return files


def write(version: int, files: Iterable[tuple[str, bytes, bytes]]) -> None:
    """What is not there yet, and its digests."""
    folder = FOLDER / f"format-{version}"
    folder.mkdir(exist_ok=True)
    index = folder / "index.json"
    known: dict[str, dict[str, str]] = json.loads(index.read_text()) if index.exists() else {}
    for name, data, decoded in files:
        if name not in known:
            (folder / name).write_bytes(data)
            known[name] = {"file": blake3(data).hexdigest(), "decoded": blake3(decoded).hexdigest()}
    index.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def main() -> None:
    write(VERSIONS[Letter.BLOB], golden_blobs())
    write(VERSIONS[Letter.MANIFEST], ((name, data, b"") for name, data in golden_sessions().items()))


if __name__ == "__main__":
    main()
