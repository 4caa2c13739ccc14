"""docs/format.md is executed: its examples are read, and its tables compared with the code."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from engine.state import DTYPES, Fingerprint, PartKind, PartSpec, Pending, Provenance, Rows, Span
from serialization import limits
from serialization.blobs import BlobClass, blob_id
from serialization.brought import Brought, Proven
from serialization.canonical import pack, unpack
from serialization.chunks import CHUNK_TOKENS, decode_rows, encode_rows
from serialization.drafts import StoredDraft
from serialization.losses import Loss, PartLoss
from serialization.manifest import FEATURES, Manifest, Message
from serialization.pipelines import DEFAULT, FAST, RAW, CodecSet
from serialization.prefix import Letter, prefix
from serialization.records import Record
from serialization.refs import BlobRef, ChunkBlob, ChunkRef
from serialization.replies import KeptReply
from tests.serialization.spelling import OLD, map_of, record_of
from tests.serialization.states import EMPTY

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
SPEC = PartSpec("k", PartKind.TOKEN, 0, "bf16", (2,))


def fenced(label: str) -> str:
    found = re.search(rf"```{label}\n(.*?)```", PAGE, re.DOTALL)
    assert found, label
    return found[1]


def dumped(label: str) -> bytes:
    """The bytes of a hex dump: offset, bytes, characters."""
    return b"".join(bytes.fromhex(line[6:53]) for line in fenced(label).splitlines())


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the first table after a heading or phrase, by their first column."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("|---"))
    rows = {}
    for line in lines[begin + 1 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
        rows[first] = others
    return rows


def test_the_example_of_a_chunk_is_what_the_code_reads_and_writes() -> None:
    values = torch.tensor([[1.0, -2.0], [0.5, 4.0]]).bfloat16()
    found = decode_rows(dumped("hex chunk"), PartKind.TOKEN, (SPEC,), 0, 2)
    assert torch.equal(found.parts[0].view(torch.bfloat16), values)
    rows = Rows(PartKind.TOKEN, 0, 2, (values.view(torch.uint8),))
    assert encode_rows(PartKind.TOKEN, (SPEC,), 0, 2, [rows], RAW) == dumped("hex chunk")
    assert blob_id(BlobClass.ROWS, dumped("hex chunk")) == fenced("text chunk-id").strip()


def test_the_example_of_a_manifest_is_what_the_code_reads_and_writes() -> None:
    wanted = replace(EMPTY, fingerprint=Fingerprint({"model": "b3-00"}, {}), created=1.5, updated=2.5)
    assert Manifest.decode(dumped("hex manifest")) == wanted
    assert map_of(dumped("hex manifest")) == dumped("hex manifest-map") == map_of(wanted.encode())
    assert Manifest.decode(OLD + dumped("hex manifest-map")) == wanted


def example_draft() -> StoredDraft:
    """Of two tokens, whose rows are the blob in the example of a chunk."""
    data = dumped("hex chunk")
    blob = ChunkBlob(PartKind.TOKEN, 0, BlobRef(blob_id(BlobClass.ROWS, data), 8, len(data)))
    made_with = Fingerprint({"model": "b3-11"}, {})
    return StoredDraft(made_with, (SPEC,), 2, (ChunkRef(0, 2, (blob,)),), (), ahead=1)


def test_the_example_of_a_draft_is_what_the_code_reads_and_writes() -> None:
    assert pack(example_draft().record()) == dumped("hex draft")
    record = Record.of(unpack(dumped("hex draft"), "test"), "test")
    assert StoredDraft.read(record, 3, CHUNK_TOKENS) == example_draft()


def test_the_keys_of_a_draft_are_those_in_the_table() -> None:
    documented = {name for key in table("### 5.2") for name in re.findall(r"`(\w+)`", key)}
    assert documented == set(example_draft().record())


def test_the_example_of_a_note_is_what_the_code_writes() -> None:
    noted = replace(EMPTY, note="hi")
    assert dumped("hex note") in map_of(noted.encode())
    assert Manifest.decode(noted.encode()) == noted


def test_the_example_of_a_salt_is_what_the_code_writes() -> None:
    salted = replace(EMPTY, salt=dumped("hex salt")[7:].decode())
    assert dumped("hex salt") in map_of(salted.encode())
    assert Manifest.decode(salted.encode()) == salted


def test_the_example_of_replies_is_what_the_code_writes() -> None:
    reply = KeptReply(bytes(range(16)), bytes(range(16, 32)), 3, 0, "eos")
    replied = replace(EMPTY, messages=(Message("assistant", "so", 0, 0),), replies=(reply,))
    assert dumped("hex replies") in map_of(replied.encode())
    assert Manifest.decode(replied.encode()) == replied


def test_the_example_of_other_chunks_is_what_the_code_writes() -> None:
    large = replace(EMPTY, chunk_tokens=1024)
    assert dumped("hex chunk-tokens") in map_of(large.encode())
    assert Manifest.decode(large.encode()) == large


def test_the_example_of_pieces_is_what_the_code_writes() -> None:
    chunks = (ChunkRef(0, 2, ()), ChunkRef(2, 3, ()))
    spans = (Span(0, 3, Provenance.COMPUTED),)
    pieced = replace(EMPTY, tokens=(1, 2, 3), spans=spans, chunks=chunks, edge=Pending(4))
    assert dumped("hex pieces") in map_of(pieced.encode())
    assert Manifest.decode(pieced.encode()) == pieced
    assert pieced.features == ("pieces",)


def test_the_example_of_a_loss_is_what_the_code_writes() -> None:
    loss = Loss(2, (PartLoss("kv.k.00", 0, "bf16", "q8_0", 0.0078125, 0.00001525879),))
    lossy = replace(EMPTY, reencoded=(loss,))
    assert dumped("hex reencoded") in map_of(lossy.encode())
    assert Manifest.decode(lossy.encode()) == lossy


def test_the_example_of_a_session_from_elsewhere_is_what_the_code_writes() -> None:
    brought = replace(EMPTY, brought=Brought("a file", Proven.ROWS, loss=0.0, drift=0.5))
    assert dumped("hex brought") in map_of(brought.encode())
    assert Manifest.decode(brought.encode()) == brought


def test_the_keys_of_where_a_session_came_from_are_those_in_the_table() -> None:
    documented = {name for key in table("### 5.8") for name in re.findall(r"`(\w+)`", key)}
    assert documented == set(Brought("a file", Proven.REREAD).record())


def test_the_features_are_those_that_the_page_names() -> None:
    (named,) = table("Every key below")["`features`"]
    assert set(re.findall(r"`(\w+)` \(5", named)) == FEATURES


def test_the_prefix_is_the_one_in_the_table() -> None:
    rows = table("## 1. Five kinds of file")
    assert rows["0"][1] == "`tenuto` in ASCII"
    assert rows["7"][1].startswith("the version of this kind of file: 2 of a manifest (5), 1 of all others.")
    for letter in Letter:
        version = b"\x02" if letter is Letter.MANIFEST else b"\x01"
        assert f"`{letter.value.decode()}`" in rows["6"][1]
        assert prefix(letter) == b"tenuto" + letter.value + version


def test_the_keys_of_a_manifest_are_those_in_the_table() -> None:
    documented = {name for key in table("Every key below") for name in re.findall(r"`(\w+)`", key)}
    assert documented == set(record_of(EMPTY.encode()))


def test_the_dtypes_are_those_in_the_table() -> None:
    for names, (nbytes, values) in table("A section before encoding").items():
        sizes = [int(each) for each in nbytes.split(", ")]
        for name, size in zip(re.findall(r"`(\w+)`", names), sizes, strict=True):
            assert DTYPES[name] == (size, int(re.match(r"\d+", values)[0]))  # type: ignore[index]
    documented = {name for key in table("A section before encoding") for name in re.findall(r"`(\w+)`", key)}
    assert documented == set(DTYPES)


def spelt(codecs: CodecSet, dtype: str) -> str:
    """A pipeline in the words of the table."""
    words = []
    for codec in codecs.pipeline(dtype):
        settings = list(codec.config.values())
        inner = "".join(f" {value}" for value in settings).replace("'", "")
        words.append(codec.name + inner)
    return ", ".join(words)


def test_the_named_sets_are_those_in_the_table() -> None:
    for dtypes, (fast, default) in table("Named sets of pipelines").items():
        for dtype in dtypes.split(", "):
            assert spelt(FAST, dtype) == fast
            assert spelt(DEFAULT, dtype) == (fast if default == "the same" else default)


def test_the_limits_are_those_in_the_table() -> None:
    numbers = [
        2 ** int(power) if power else int(plain.replace(",", ""))
        for cells in table("## 7. Limits").values()
        for power, plain in re.findall(r"2\^(\d+)|(?<!UTF-)\b(\d[\d,]*)\b", cells[0])
    ]
    assert numbers == [
        limits.MAX_BLOB_NBYTES,
        limits.MAX_RAW_NBYTES,
        limits.MAX_HEADER_NBYTES,
        limits.MAX_MANIFEST_NBYTES,
        limits.MAX_PACKED,
        limits.MIN_PACKED_NBYTES,
        limits.MAX_TOKENS,
        limits.MAX_TOKEN_ID + 1,
        limits.MAX_CHUNKS,
        limits.MAX_ENTRIES,
        limits.MAX_TEXT_NBYTES,
        limits.MAX_NOTE_NBYTES,
        limits.MAX_REPLIES,
        limits.MAX_LOSSES,
        limits.MAX_PARTS,
        limits.MAX_AXES,
        limits.MAX_ROW_NBYTES,
        limits.MAX_WINDOW,
        limits.MAX_FINGERPRINT,
        limits.MAX_KEY,
        limits.MAX_VALUE_NBYTES,
        limits.MAX_ENTRIES,
        limits.MAX_LABEL_NBYTES,
        limits.MAX_FEATURES,
        limits.MAX_CODECS,
        limits.MAX_STREAMS,
    ]
