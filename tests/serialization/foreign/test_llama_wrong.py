"""Every way for a llama.cpp state to be wrong: a typed error that says where, and bounded memory."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from engine.errors import Corrupt, LimitExceeded, StateError, UnknownFeature, UnknownFormat
from serialization.foreign.detect import read_files, read_llama, sequences
from serialization.foreign.files import write_file
from serialization.foreign.geometry import Geometry
from tests.golden.llama import (
    AT,
    CELLS,
    IDS,
    PLAIN,
    POINT,
    Kv,
    i32,
    name_of,
    outputs,
    owned,
    packed,
    sequence_file,
    session_file,
    tokens,
    u32,
)
from tests.serialization.foreign.geometries import GEOMETRIES
from tests.serialization.foreign.test_llama_golden import NAMES, geometry_of, golden

MODEL = GEOMETRIES["plain"]


def refused(data: bytes, geometry: Geometry) -> StateError:
    with pytest.raises(StateError) as caught:
        read_files(data, geometry)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_ends_early_is_refused_wherever_it_ends(name: str) -> None:
    data, geometry = golden(name), geometry_of(name)
    for end in range(0, len(data), 4):
        refused(data[:end], geometry)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_goes_on_is_refused(name: str) -> None:
    data, geometry = golden(name), geometry_of(name)
    for more in (b"\0", bytes(4), data):
        refused(data + more, geometry)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_word_is_another_the_file_is_refused_or_means_exactly_that(name: str) -> None:
    """What is read is all that the file says: written again it is the same bytes, or it was refused."""
    data, geometry = golden(name), geometry_of(name)
    for at in range(0, len(data) - 3, 4):
        word = 0xFFFFFFFF if at % 8 else 0
        changed = data[:at] + u32(word) + data[at + 4 :]
        try:
            files = read_files(changed, geometry)
        except StateError:
            continue
        for file in files:
            assert b"".join(write_file(file, geometry)) == changed


def word_at(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + u32(value) + data[at + 4 :]


#: where things are in golden("plain.3"): a head of 24 bytes, one stream of three cells of 12 bytes
CELL, AFTER_CELLS = 32, 68
KEYS, ROW_NBYTES = AFTER_CELLS + 8, AFTER_CELLS + 12


@pytest.mark.parametrize(
    ("at", "value", "kind", "said"),
    [
        (8, 1_000_000, Corrupt, r"at byte 8: 1000000 tokens cannot be in the 880 bytes that are left"),
        (12, 100, Corrupt, r"at byte 12: token 100, where the model knows 100"),
        (12, 2**32 - 2, Corrupt, r"at byte 12: token -2, where the model knows 100"),
        (24, 257, LimitExceeded, r"at byte 24: 257 streams, where 256 are allowed"),
        (24, 0, Corrupt, r"a cache without streams"),
        (28, 0, Corrupt, r"a cache without cells"),
        (28, 1_000_000, Corrupt, r"at byte 28: 1000000 cells cannot be in the"),
        (CELL, 2**32 - 1, Corrupt, r"at byte 32: a cell of a negative position"),
        (CELL, 1, Corrupt, r"at byte 32: two cells of one sequence have the same position"),
        (CELL + 4, 2, Corrupt, r"at byte 32: a cell of other than 1 owners"),
        (CELL + 8, 1, Corrupt, r"at byte 32: cells of several sequences in the state of one"),
        (AFTER_CELLS, 2, Corrupt, r"at byte 68: values are upright \(0\) or transposed \(1\), not 2"),
        (AFTER_CELLS + 4, 3, Corrupt, r"at byte 72: 3 layers, where the model has 2 in its full cache"),
        (KEYS, 99, Corrupt, r"at byte 76: k of layer 0: there is no tensor type 99"),
        (
            KEYS,
            0,
            Corrupt,
            r"at byte 80: k of layer 0: rows of 64 bytes, where the model has 32 values of f32",
        ),
        (ROW_NBYTES, 66, Corrupt, r"rows of 66 bytes, where the model has 32 values of f16"),
        (ROW_NBYTES + 4, 1, Corrupt, r"rows of 4294967360 bytes"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(at: int, value: int, kind: type[StateError], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        read_llama(word_at(golden("plain.3"), at, value), MODEL)
    assert type(caught.value) is kind
    assert isinstance(caught.value.details["offset"], int)


def test_types_that_are_known_by_their_size_alone_are_refused_by_name() -> None:
    kv = replace(PLAIN, keys=("q4_1", 32))
    with pytest.raises(UnknownFeature, match="k of layer 0 are stored as q4_1, which is not converted"):
        read_llama(sequence_file(3, IDS, kv), MODEL)
    with pytest.raises(UnknownFeature, match="q4_1"):  # whatever else might have been meant by its version
        read_llama(sequence_file(2, IDS, kv), MODEL)


def test_values_of_another_size_are_refused_however_they_lie() -> None:
    for transposed in (False, True):
        kv = replace(PLAIN, values=("f16", 64), transposed=transposed)
        with pytest.raises(Corrupt, match="v of layer 0"):
            read_llama(sequence_file(3, IDS, kv), MODEL)


def test_transposed_values_are_plain_and_as_many_and_as_large_as_the_models() -> None:
    data = golden("plain.3-transposed")
    at = data.index(u32(1, 2, 32))  # f16, two bytes, 32 values
    for where, value in ((at, 8), (at, 0), (at + 4, 4), (at + 8, 16)):
        with pytest.raises(Corrupt, match="transposed v of layer 0"):
            read_llama(word_at(data, where, value), MODEL)
    blocks = word_at(word_at(data, at, 8), at + 4, 34)  # q8_0, as large as its block
    with pytest.raises(Corrupt, match="transposed v of layer 0"):
        read_llama(blocks, MODEL)


def test_a_failure_of_several_layouts_says_what_each_failed_at() -> None:
    data = word_at(golden("plain.2c"), 8 + 4 + 12 + 4 + 4, 7_777)
    with pytest.raises(Corrupt, match="no layout fits") as caught:
        read_llama(data + bytes(4), MODEL)
    assert [name for name, _ in caught.value.details["failures"]] == ["2a", "2b", "2c"]  # type: ignore[attr-defined]
    with pytest.raises(UnknownFormat, match="no layout fits"):
        read_llama(b"anything at all, and long enough", MODEL)
    with pytest.raises(UnknownFormat):
        read_llama(b"", MODEL)


def test_the_wrong_model_is_refused_by_its_geometry() -> None:
    with pytest.raises(Corrupt, match="3 layers, where the model has 2"):
        read_llama(sequence_file(3, IDS, replace(PLAIN, layers=(0, 1, 2))), MODEL)
    with pytest.raises(Corrupt, match="bytes too many"):
        read_llama(golden("hybrid.3"), replace(GEOMETRIES["hybrid"], caches=GEOMETRIES["hybrid"].caches[:1]))


def test_states_of_a_big_endian_machine_and_of_deepseek_v4_are_refused_by_name() -> None:
    with pytest.raises(UnknownFeature, match="big-endian"):
        read_llama(struct.pack(">3I", 0x67677371, 3, 0), MODEL)
    with pytest.raises(UnknownFeature, match="DeepSeek-V4"):
        read_llama(u32(0x67677371, 3) + tokens(IDS) + u32(0x34565344, 1, 0), MODEL)


def test_two_streams_of_one_sequence_are_one_too_many() -> None:
    both = replace(PLAIN, cells=(CELLS, CELLS))
    with pytest.raises(Corrupt, match="in 2 streams"):
        read_llama(sequence_file(3, IDS, both), MODEL)
    with pytest.raises(Corrupt, match="in 2 streams"):
        read_llama(session_file(10, IDS, name_of("llama"), both), MODEL)


def test_caches_that_have_a_sequence_in_different_streams_are_refused() -> None:
    full, window = Kv((1,), (CELLS, ())), Kv((0, 2), ((), CELLS))
    with pytest.raises(Corrupt, match="different streams"):
        read_llama(sequence_file(3, IDS, full, window), GEOMETRIES["iswa"])


def test_a_state_that_names_another_sequence_than_its_prefix_is_refused() -> None:
    with pytest.raises(Corrupt, match="names several"):
        read_llama(u32(0xAF143CD8) + i32(1) + PLAIN.data(), MODEL)


def test_recurrent_state_is_one_of_this_model_and_upright() -> None:
    model = GEOMETRIES["recurrent"]
    for part, said in (
        (replace(POINT, cells=((1, ()), (2, ()))), "2 recurrent states in the state of one sequence"),
        (replace(POINT, num_layers=4), "4 layers, where the model has 3"),
        (replace(POINT, conv=7), "r of layer 0: rows of 28 bytes"),
        (replace(POINT, cells=((2, (0,)),)), "a cell of other than 0 owners"),
    ):
        with pytest.raises(Corrupt, match=said):
            read_llama(sequence_file(3, IDS, part), model)
    at = 24 + 4 + 8
    with pytest.raises(Corrupt, match="never transposed"):
        read_llama(word_at(golden("recurrent.3"), at, 1), model)


def test_a_context_in_which_nobody_has_anything_is_refused() -> None:
    nobody = replace(POINT, cells=())
    with pytest.raises(Corrupt, match="without any cells"):
        read_llama(session_file(10, IDS, name_of("mamba"), nobody), GEOMETRIES["recurrent"])


def test_pictures_do_not_share_a_place() -> None:
    twice = Kv((0,), (tuple((5, (0,), (1, 2, -1)) for _ in AT),))
    with pytest.raises(Corrupt, match="the same position"):
        read_llama(sequence_file(3, IDS, twice), GEOMETRIES["pictures"])


def test_an_owner_that_llama_cpp_cannot_have_is_refused() -> None:
    for owners in ((256,), (-1,)):
        with pytest.raises(Corrupt, match="a sequence beyond 0 to 255"):
            read_llama(sequence_file(3, IDS, replace(PLAIN, cells=(owned(AT, *owners),))), MODEL)
    nobody = replace(PLAIN, cells=((*owned((0,), 0), *owned((1,))),))
    with pytest.raises(Corrupt, match="at byte 53: a cell of 0 owners"):  # the second one
        read_llama(session_file(10, IDS, name_of("llama"), nobody), MODEL)


@pytest.mark.parametrize("change", [(1, 2), (2, 4), (2, 2**31 - 1), (6, 1), (6, 2**31 - 1)])
def test_packed_tokens_that_do_not_end_where_their_list_does_are_refused(change: tuple[int, int]) -> None:
    words = packed(IDS)
    words[change[0]] = change[1]
    refused(sequence_file(3, words, PLAIN), MODEL)


def test_media_are_inside_of_the_tokens_and_padded_with_zeros() -> None:
    kv = Kv((0,), (owned(AT, 0, words=3),))
    behind = packed((11, -1, 13), [(3, b"12345678")])
    with pytest.raises(Corrupt, match="starts behind the last token"):
        read_llama(sequence_file(3, behind, kv), GEOMETRIES["pictures"])
    first = sequence_file(3, packed((-1, -1, 13), [(0, b"12345678"), (1, b"1")]), kv)
    assert read_llama(first, GEOMETRIES["pictures"]).notes == (
        "2 media stand among the tokens, which are not taken",
    )
    padded = packed((11, -1, 13), [(1, b"1234567")])
    padded[-1] |= 1 << 24
    with pytest.raises(Corrupt, match="do not end where their list does"):
        read_llama(sequence_file(3, padded, kv), GEOMETRIES["pictures"])


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (outputs((2,), 99, 0), "99 logits of 1 outputs over 100 tokens"),
        (outputs((2, 3), 100, 0), "100 logits of 2 outputs over 100 tokens"),
        (outputs((), 0, 8), "8 values of embeddings of 0 outputs"),
        (outputs((1, 2), 0, 25), "25 values of embeddings of 2 outputs"),
    ],
)
def test_outputs_are_as_many_as_the_vocabulary_says(section: bytes, said: str) -> None:
    with pytest.raises(Corrupt, match=said):
        read_llama(session_file(9, IDS, name_of("llama") + section, PLAIN), MODEL)


def test_as_many_streams_and_owners_as_llama_cpp_has_at_most_are_read() -> None:
    last = replace(PLAIN, cells=(*[()] * 255, owned(AT, 255)))
    assert sequences(sequence_file(3, IDS, last), MODEL) == (255,)
    shared = replace(PLAIN, cells=(owned(AT, *range(256)),))
    assert sequences(session_file(10, IDS, name_of("llama"), shared), MODEL) == tuple(range(256))
    unlike = replace(PLAIN, cells=((*owned((0,), *range(256)), *owned((1,), 7)),))
    assert len(sequences(session_file(10, IDS, name_of("llama"), unlike), MODEL)) == 256
    many = replace(PLAIN, cells=(owned((0,), *range(256), 0),))
    with pytest.raises(Corrupt, match="a cell of 257 owners"):
        read_llama(session_file(10, IDS, name_of("llama"), many), MODEL)


def test_a_name_as_long_as_one_may_be_is_read() -> None:
    long = replace(MODEL, architecture="x" * 64)
    assert read_llama(session_file(10, IDS, name_of("x" * 64), PLAIN), long).length == 3


@pytest.mark.parametrize("name", [b"", b"\xff\xfe", b"two words", b"x" * 65])
def test_a_name_that_no_architecture_has_is_refused(name: bytes) -> None:
    refused(session_file(10, IDS, u32(len(name)) + name, PLAIN), MODEL)


def test_far_more_tokens_than_rows_are_refused_and_a_few_more_are_not() -> None:
    assert len(read_llama(sequence_file(3, [7] * 1030, PLAIN), MODEL).tokens or ()) == 1030
    with pytest.raises(LimitExceeded, match="lists 1031 tokens, and has rows of 3"):
        read_llama(sequence_file(3, [7] * 1031, PLAIN), MODEL)
