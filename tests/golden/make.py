"""Writes the golden files of the format's version. Run once for each version: python -m tests.golden.make

Files that exist are never written again: what an old build wrote must be readable for ever, also where a
build of today would write other bytes (another zstd, another choice of codec).
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from engine.state import NextLogits, PartKind, PartSpec, Point, Rows, parts_of
from serialization.archive import write_archive
from serialization.chunks import encode_rows
from serialization.manifest import Manifest, Message
from serialization.pipelines import CODEC_SETS, DEFAULT
from serialization.points import encode_logits, encode_point
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

FOLDER = Path(__file__).parent / "format-1"
#: one part for each dtype, wide enough that its codec is worth while
LAYOUT = tuple(
    PartSpec(dtype, PartKind.TOKEN, 0, dtype, (64,))
    for dtype in ("bf16", "f16", "f32", "i64", "q8_0", "q5_0", "q4_0")
)
NUM_ROWS = 40


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


def golden_files() -> dict[str, tuple[bytes, bytes]]:
    """(content, decoded bytes) of every golden file, by name."""
    files = {}
    rows = golden_rows()
    decoded = b"".join(part.numpy().tobytes() for part in rows.parts)
    for name, codecs in CODEC_SETS.items():
        data = encode_rows(PartKind.TOKEN, LAYOUT, 0, NUM_ROWS, [rows], codecs)
        files[f"chunk-{name}.blob"] = (data, decoded)
    specs = parts_of(FOUR_KINDS, PartKind.POINT)
    point = Point(9, tuple(row_bytes(spec, 9, 10)[0] for spec in specs))
    point_bytes = b"".join(part.numpy().tobytes() for part in point.parts)
    files["point.blob"] = (encode_point(specs, point, DEFAULT), point_bytes)
    logits = torch.linspace(-4, 4, 99)
    files["logits.blob"] = (encode_logits(logits, 9, DEFAULT), logits.numpy().tobytes())
    plain = state_of(20, edge=NextLogits(logits))
    for name, state in (("session", plain), ("session-draft", drafted(plain, 18, ahead=2))):
        store = CountingStore()
        manifest = manifest_of(state, write_state(store, state, None, 0))
        files[f"{name}.manifest"] = (manifest.encode(), b"")
        out = io.BytesIO()
        write_archive(out, manifest, store)
        files[f"{name}.tenuto"] = (out.getvalue(), b"")
    noted = replace(Manifest.decode(files["session.manifest"][0]), note="what else belongs to it")
    files["session-note.manifest"] = (noted.encode(), b"")
    salted = replace(Manifest.decode(files["session.manifest"][0]), salt="b3-" + "0123456789abcdef" * 4)
    files["session-salt.manifest"] = (salted.encode(), b"")
    said = (Message("user", "why?", 0, 2), Message("assistant", "so", 2, 4))
    replied = replace(
        Manifest.decode(files["session.manifest"][0]),
        messages=said,
        replies=(KeptReply(bytes(range(16)), bytes(range(16, 32)), 3, 1, "eos"),),
    )
    files["session-replies.manifest"] = (replied.encode(), b"")
    return files


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    index = FOLDER / "index.json"
    known: dict[str, dict[str, str]] = json.loads(index.read_text()) if index.exists() else {}
    for name, (data, decoded) in golden_files().items():
        if name not in known:
            (FOLDER / name).write_bytes(data)
            known[name] = {"file": blake3(data).hexdigest(), "decoded": blake3(decoded).hexdigest()}
    index.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
