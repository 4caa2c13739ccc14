"""What a manifest takes, by the length of its conversation: bytes in each version of the format, and the time
to write and read it."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from itertools import cycle
from pathlib import Path

from benchmarks.figures import english, seconds, tell
from engine.state import PartKind, PartSpec, Pending, Provenance, Span
from engine.tokenizer import Tokenizer, open_tokenizer
from engine.weights.source import open_weights
from serialization.blobs import BlobId
from serialization.chunks import CHUNK_TOKENS
from serialization.manifest import Manifest, Message
from serialization.refs import BlobRef, ChunkBlob, ChunkRef
from tests.serialization.spelling import map_of
from tests.serialization.states import EMPTY

_LENGTHS = (500, 4096, 32_768, 131_072)
#: Paragraphs of a question and of its answer.
_TURN = (1, 3)
_LAYOUT = tuple(
    PartSpec(name, PartKind.TOKEN, layer, "bf16", (3, 64)) for layer in range(30) for name in ("k", "v")
)


def run(model: str, path: Path) -> None:
    tokenizer = open_tokenizer(open_weights(path).tokenizer_data)
    for length in _LENGTHS:
        manifest = conversation(tokenizer, length)
        data = manifest.encode()
        plain = len(map_of(data)) + 8
        tell(
            "manifest",
            model=model,
            tokens=manifest.length,
            version_1_bytes=plain,
            bytes=len(data),
            ratio=plain / len(data),
            encode_ms=1e3 * seconds(manifest.encode, 9),
            decode_ms=1e3 * seconds(lambda data=data: Manifest.decode(data), 9),
        )


def conversation(tokenizer: Tokenizer, length: int) -> Manifest:
    """Of `length` tokens or a few more: the project's own prose and code, no paragraph twice while there are
    others."""
    paragraphs = cycle(part for part in english().split("\n\n") if 60 < len(part) < 2000)
    tokens: list[int] = []
    messages: list[Message] = []
    while len(tokens) < length:
        for role, count in zip(("user", "assistant"), _TURN, strict=True):
            said, start = "\n\n".join(next(paragraphs) for _ in range(count)), len(tokens)
            tokens += tokenizer.encode(said)
            messages.append(Message(role, said, start, len(tokens)))
    return replace(
        EMPTY,
        tokens=tuple(tokens),
        messages=tuple(messages),
        layout=_LAYOUT,
        spans=(Span(0, len(tokens), Provenance.COMPUTED),),
        chunks=tuple(_chunk(start, len(tokens)) for start in range(0, len(tokens), CHUNK_TOKENS)),
        edge=Pending(5),
    )


def _chunk(start: int, length: int) -> ChunkRef:
    name = BlobId(f"rows-b3-{sha256(str(start).encode()).hexdigest()}")
    ref = BlobRef(name, 5_898_240, 3_900_000 + start % 4099)
    stop = min(length, start + CHUNK_TOKENS)
    return ChunkRef(start, stop, (ChunkBlob(PartKind.TOKEN, start, ref),))
