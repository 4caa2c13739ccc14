"""GGUF files: what is sound is read lazily, what is not is refused at once, whatever it declares."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.errors import WeightsRefused
from engine.tokenizer import open_tokenizer
from engine.weights.from_gguf import GgufWeights
from engine.weights.gguf import MAX_PAIRS, MAX_TENSORS, GgufFile, StringArray
from tests.tiny import write_tiny

U32, STRING, ARRAY, U64 = 4, 8, 9, 10
HUGE = 2**63


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, code: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", code) + value


def tensor(
    name: str, dims: tuple[int, ...], code: int = 0, offset: int = 0, axes: int | None = None
) -> bytes:
    count = len(dims) if axes is None else axes
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, code, offset)


def file_of(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = bytes(256),
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_pairs = counts or (len(tensors), len(pairs))
    head = struct.pack("<4sIQQ", magic, version, num_tensors, num_pairs) + b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % 32) + data


def opened(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return GgufFile(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=1)


def header_size(path: Path) -> int:
    return min(info.start for info in GgufFile(path).tensors.values())


def test_a_sound_file_is_read_as_the_reference_reads_it(tiny: Path) -> None:
    ours, theirs = GgufFile(tiny), gguf.GGUFReader(tiny)
    assert set(ours.values) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    for name, value in ours.values.items():
        expected = theirs.fields[name].contents()
        got = list(value) if isinstance(value, StringArray | np.ndarray) else value
        assert got == expected, name
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for t in theirs.tensors:
        assert ours.tensors[t.name].shape == tuple(reversed(t.shape.tolist()))
        assert ours.rows(t.name).tobytes() == t.data.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_in_use_are_read(version: int, path: Path) -> None:
    content = file_of((pair("a", U32, struct.pack("<I", 7)),), (tensor("t", (8, 8)),), version=version)
    file = opened(path, content)
    assert file.values["a"] == 7
    assert file.tensors["t"].shape == (8, 8)


def test_strings_of_arrays_are_read_one_by_one(path: Path) -> None:
    words = ["", "a", "é🎶", "x" * 300]
    packed = struct.pack("<IQ", STRING, len(words)) + b"".join(map(text, words))
    array = opened(path, file_of((pair("words", ARRAY, packed),))).values["words"]
    assert isinstance(array, StringArray)
    assert [array[i] for i in range(4)] == words == list(array) == array[:]
    assert (array[-1], array[1:3]) == (words[-1], words[1:3])
    with pytest.raises(IndexError):
        array[4]


ONE = (tensor("t", (8, 8)),)
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "too short for a header": b"GGUF\3\0\0\0",
    "another magic": file_of(magic=b"GGML"),
    "version 1": file_of(version=1),
    "version 4": file_of(version=4),
    "big-endian": file_of(version=3 << 24),
    "huge number of pairs": file_of(counts=(0, HUGE)),
    "huge number of tensors": file_of(counts=(HUGE, 0)),
    "one pair more than there is": file_of(counts=(0, 60_000), data=b""),
    "one tensor more than there is": file_of(counts=(60_000, 0), data=b""),
    "huge key": file_of((struct.pack("<Q", HUGE),)),
    "key that is no UTF-8": file_of((struct.pack("<Q", 2) + b"\xff\xff" + bytes(8),)),
    "key of many lines": file_of((pair("a\n" * 20_000, 13, bytes(8)),)),
    "key twice": file_of((pair("a", U32, bytes(4)), pair("a", U32, bytes(4)))),
    "unknown type": file_of((pair("a", 13, bytes(8)),)),
    "huge string": file_of((pair("a", STRING, struct.pack("<Q", HUGE)),)),
    "huge array": file_of((pair("a", ARRAY, struct.pack("<IQ", U32, HUGE)),)),
    "array longer than the file": file_of((pair("a", ARRAY, struct.pack("<IQ", U64, 100)),)),
    "huge array of strings": file_of((pair("a", ARRAY, struct.pack("<IQ", STRING, 2**40)),)),
    "array of strings without an end": file_of((pair("a", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE)),)),
    "array of strings past the end": file_of((pair("a", ARRAY, struct.pack("<IQQ", STRING, 2, 10_000)),)),
    "array in an array": file_of((pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64)),)),
    "huge tensor name": file_of((), (struct.pack("<Q", HUGE),)),
    "tensor twice": file_of((), (*ONE, *ONE)),
    "no axes": file_of((), (tensor("t", ()),)),
    "five axes": file_of((), (tensor("t", (1, 1, 1, 1, 1)),)),
    "huge number of axes": file_of((), (tensor("t", (8,), axes=2**32 - 1),)),
    "axis of zero": file_of((), (tensor("t", (8, 0)),)),
    "huge axis": file_of((), (tensor("t", (8, HUGE)),)),
    "product of axes that wraps around": file_of((), (tensor("t", (2**32, 2**32)),)),
    "unknown tensor type": file_of((), (tensor("t", (8, 8), code=999),)),
    "half a block": file_of((), (tensor("t", (8, 8), code=2),)),
    "tensor past the end": file_of((), (tensor("t", (8, 9)),)),
    "huge offset": file_of((), (tensor("t", (8, 8), offset=2**64 - 32),)),
    "offset that is not aligned": file_of((), (tensor("t", (4, 4), offset=4),)),
    "tensors over each other": file_of((), (tensor("t", (8, 4)), tensor("u", (8, 4), offset=32))),
    "alignment of zero": file_of((pair("general.alignment", U32, bytes(4)),), ONE),
    "alignment of three": file_of((pair("general.alignment", U32, struct.pack("<I", 3)),), ONE),
    "huge alignment": file_of((pair("general.alignment", U32, struct.pack("<I", 2**31)),), ONE),
    "alignment that is a text": file_of((pair("general.alignment", STRING, text("32")),), ONE),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_at_once_without_believing_its_sizes(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(WeightsRefused, match=r"^some\.gguf: ") as refused:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 1
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("counts", [(MAX_TENSORS + 1, 0), (0, MAX_PAIRS + 1)])
def test_counts_beyond_the_limits_are_refused_before_anything_is_read(
    counts: tuple[int, int], path: Path
) -> None:
    with pytest.raises(WeightsRefused, match="declares"):
        opened(path, file_of(counts=counts))


def test_the_file_that_is_broken_above_is_sound_otherwise(path: Path) -> None:
    assert set(opened(path, file_of((), ONE)).tensors) == {"t"}


def test_a_file_cut_anywhere_is_refused(tiny: Path, path: Path) -> None:
    whole, header = tiny.read_bytes(), header_size(tiny)
    last = max(info.start + info.nbytes for info in GgufFile(tiny).tensors.values())
    drawn = random.Random(0)
    lengths = [
        *range(64),
        *drawn.sample(range(header), 300),
        *drawn.sample(range(header, last), 30),
        last - 1,
    ]
    for length in lengths:
        with pytest.raises(WeightsRefused):
            opened(path, whole[:length])
    assert opened(path, whole[:last]).tensors


def test_a_header_with_any_byte_changed_is_refused_or_read_but_never_breaks_anything(
    tiny: Path, path: Path
) -> None:
    whole, header = tiny.read_bytes(), header_size(tiny)
    drawn = random.Random(1)
    refused = 0
    for position in [*range(200), *drawn.sample(range(header), 700)]:
        changed = bytearray(whole)
        changed[position] ^= 1 << drawn.randrange(8)
        path.write_bytes(changed)
        try:
            weights = GgufWeights(path)
            _ = weights.hparams, weights.chat_template, weights.name
            open_tokenizer(weights.tokenizer_data).encode("the <|im_end|> 1")
        except WeightsRefused:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.add_uint32("llama.attention.head_count", 0), "head_count"),
        (lambda w: w.add_uint32("llama.block_count", 2**31), "block_count"),
        (lambda w: w.add_string("llama.embedding_length", "wide"), "embedding_length"),
        (lambda w: w.add_float32("llama.rope.freq_base", float("nan")), "freq_base"),
        (lambda w: w.add_string("llama.rope.scaling.type", "magic"), "scaling.type"),
        (lambda w: w.add_uint32("llama.rope.dimension_count", 7), "dimension_count"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_by_its_name(
    change: Callable[[gguf.GGUFWriter], None], said: str, path: Path
) -> None:
    given = {
        "block_count": 1,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 1,
        "context_length": 64,
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    for key, value in given.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.kv_data[0] = {k: v for k, v in writer.kv_data[0].items() if said not in k}
    change(writer)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsRefused, match=said):
        _ = GgufWeights(path).hparams


def test_rows_of_q_and_k_are_put_into_half_split_order(tiny: Path) -> None:
    stored = GgufFile(tiny)
    weights = GgufWeights(tiny)
    head = int(weights.hparams["attention.key_length"])
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        raw = stored.rows(name).view("<f4")
        ours = weights.tensor(name, torch.float32).numpy()
        for first in range(0, raw.shape[0], head):
            for i in range(head // 2):
                assert (ours[first + i] == raw[first + 2 * i]).all()
                assert (ours[first + head // 2 + i] == raw[first + 2 * i + 1]).all()
    name = "blk.0.attn_v.weight"
    assert (weights.tensor(name, torch.float32).numpy() == stored.rows(name).view("<f4")).all()


def test_gemma_keeps_its_order(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "g.gguf", "gemma3", layers=1)
    name = "blk.0.attn_q.weight"
    stored = GgufFile(path).rows(name).view("<f4")
    assert (GgufWeights(path).tensor(name, torch.float32).numpy() == stored).all()


def test_the_digest_is_of_the_content_alone(tiny: Path, tmp_path: Path) -> None:
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    content = bytearray(tiny.read_bytes())
    same.write_bytes(content)
    content[-5] ^= 1
    other.write_bytes(content)
    assert GgufWeights(same).digest == GgufWeights(tiny).digest != GgufWeights(other).digest
    assert GgufWeights(tiny).digest.startswith("b3-")


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_decoded_as_the_reference_decodes_them(kind: str, path: Path) -> None:
    quant = GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((1100, 256)).astype(np.float32)  # more than a slice
    stored = gguf.quants.quantize(values, quant)
    expected = torch.from_numpy(gguf.quants.dequantize(stored, quant).astype(np.float32))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("m", stored, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GgufWeights(path)
    assert torch.equal(weights.tensor("m", torch.float32), expected)
    assert torch.equal(weights.tensor("m", torch.bfloat16), expected.bfloat16())


def test_a_vocabulary_is_not_touched_by_opening_a_file(gemma3_path: Path) -> None:
    began = time.process_time()
    weights = GgufWeights(gemma3_path)
    _ = weights.hparams
    assert time.process_time() - began < 1.5
    assert len(weights.tokenizer_data.tokens) == 262_144
