"""Blobs that are true at one position: point state of a checkpoint, and the logits of an edge."""

from __future__ import annotations

import torch

from engine.errors import Corrupt
from engine.state import Layout, Point
from serialization.blobs import Bytes
from serialization.chunks import decode_frame, encode_frame
from serialization.headers import Part, Parts
from serialization.pipelines import CodecSet


def encode_point(specs: Layout, point: Point, codecs: CodecSet) -> bytes:
    """The blob of the point state at `point.position`. Raises as `chunks.encode_frame`."""
    pieces = [(part,) for part in point.parts]
    return encode_frame("point", point.position, point.position, _point_parts(specs), pieces, codecs)


def decode_point(data: Bytes, specs: Layout, position: int) -> Point:
    """The point state of a blob that must be of this position. Raises as `chunks.decode_frame`."""
    frame = decode_frame(data, "point", position, position, _point_parts(specs))
    return Point(position, tuple(tensor.reshape(-1) for tensor in frame.tensors))


def _point_parts(specs: Layout) -> Parts:
    return tuple(Part(spec.dtype, spec.shape, 1, 1) for spec in specs)


def point_nbytes(specs: Layout) -> int:
    """Bytes of the point state before encoding."""
    return sum(spec.row_nbytes for spec in specs)


def encode_logits(logits: torch.Tensor, position: int, codecs: CodecSet) -> bytes:
    """The blob of the float32 [vocab] logits that follow the token before `position`."""
    if logits.dtype != torch.float32 or logits.dim() != 1:
        raise Corrupt("logits to be stored are not one row of float32")
    raw = logits.detach().contiguous().view(torch.uint8)
    return encode_frame("logits", position, position, _logit_parts(logits.numel()), [(raw,)], codecs)


def decode_logits(data: Bytes, position: int, num_logits: int) -> torch.Tensor:
    """float32 [num_logits]. Raises as `chunks.decode_frame`."""
    frame = decode_frame(data, "logits", position, position, _logit_parts(num_logits))
    return frame.tensors[0].reshape(-1).view(torch.float32)


def _logit_parts(num_logits: int) -> Parts:
    return (Part("f32", (num_logits,), 1, 1),)
