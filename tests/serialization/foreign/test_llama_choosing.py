"""Which sequence, and which meaning: what cannot be known is asked for, or refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import AmbiguousFormat, FingerprintMismatch, UnknownVersion, Unsupported
from serialization.foreign import detect
from serialization.foreign.containers import FORM, NEWEST, Form, write_container, write_sequence_file
from serialization.foreign.detect import read_files, read_llama, sniff
from serialization.foreign.files import Container
from serialization.foreign.foreign_state import ForeignState, Rotation, ValueOrder
from serialization.foreign.geometry import Geometry
from serialization.foreign.grammar import BY_NAME, GRAMMARS, Scope, grammars_of
from tests.golden.llama import (
    AT,
    IDS,
    POINT,
    Kv,
    i32,
    name_of,
    outputs,
    owned,
    packed,
    sequence_file,
    session_file,
    u32,
)
from tests.serialization.foreign.geometries import GEMMA3, GEOMETRIES, SMOLLM2
from tests.serialization.foreign.test_llama_golden import golden

PLAIN = GEOMETRIES["plain"]


def written(data: bytes, geometry: Geometry, form: Form) -> bytes:
    return b"".join(write_container(read_llama(data, geometry), geometry, form))


def test_a_file_of_several_sequences_asks_which() -> None:
    with pytest.raises(AmbiguousFormat, match="sequences 0, 3: say which") as caught:
        read_llama(golden("plain.10-two-sequences"), PLAIN)
    assert caught.value.details["sequences"] == (0, 3)


def read_as(first: bytes, other: bytes, geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> ForeignState:
    """No bytes are known that two layouts read differently: two readings are put in their place."""
    files = [read_files(each, geometry)[0] for each in (first, other)]
    monkeypatch.setattr(detect, "read_files", lambda buffer, geometry: files)
    return read_llama(b"", geometry)


#: (model, two files of it that differ in one thing alone)
DIFFERING = {
    "tokens": ("plain", golden("plain.3"), golden("plain.3-one-id-more")),
    "positions": ("plain", golden("plain.3"), golden("plain.3-any-order")),
    "rows": ("plain", golden("plain.3"), golden("plain.3")[:-1] + b"\0"),
    "types": ("plain", golden("plain.3-f16"), golden("plain.3-bf16")),
    "where the state is": (
        "recurrent",
        sequence_file(3, IDS, POINT),
        sequence_file(3, IDS, replace(POINT, cells=((3, ()),))),
    ),
    "the state": ("recurrent", golden("recurrent.3"), golden("recurrent.3")[:-1] + b"\0"),
}


@pytest.mark.parametrize("what", DIFFERING)
def test_readings_that_mean_different_things_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, first, other = DIFFERING[what]
    with pytest.raises(AmbiguousFormat, match="as layout 3 and as 3, which mean different things"):
        read_as(first, other, GEOMETRIES[model], monkeypatch)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("plain.3", "plain.2b"),
        ("plain.3", "plain.3-transposed"),
        ("hybrid.3", "hybrid.10"),
        ("iswa.3", "iswa.2c"),
    ],
)
def test_readings_that_mean_the_same_are_one(first: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GEOMETRIES[first.split(".")[0]]
    assert read_as(golden(first), golden(other), model, monkeypatch).layout == "3"


@pytest.mark.parametrize("scope", Scope)
def test_versions_known_by_number_alone_are_refused_by_it(scope: Scope) -> None:
    version = {Scope.SEQUENCE: 4, Scope.CONTEXT: 11}[scope]
    magic = {Scope.SEQUENCE: 0x67677371, Scope.CONTEXT: 0x6767736E}[scope]
    with pytest.raises(UnknownVersion, match=rf"{scope} version {version} \(written by llama.cpp 0.6.0\)"):
        read_llama(u32(magic, version, 0), PLAIN)
    with pytest.raises(UnknownVersion, match=f"{scope} version 77 is not read"):
        read_llama(u32(magic, 77, 0), PLAIN)


def test_the_version_table_has_every_layout_once_and_the_older_first() -> None:
    names = [each.name for each in GRAMMARS]
    assert names == ["2a", "2b", "2c", "2d", "3", "9a", "9b", "9c", "9d", "10"]
    assert [each.name for each in grammars_of(Scope.SEQUENCE, 2)] == names[:4]
    assert [each.name for each in grammars_of(Scope.CONTEXT, 9)] == names[5:9]


@pytest.mark.parametrize("name", ["plain.10", "plain.9b"])
def test_a_session_of_another_architecture_is_another_models(name: str) -> None:
    with pytest.raises(
        FingerprintMismatch, match=r"^the state is of a llama model, and the model is gemma3$"
    ):
        read_llama(golden(name), replace(PLAIN, architecture="gemma3"))


def test_what_begins_with_no_magic_is_read_only_where_that_is_asked() -> None:
    assert not sniff(golden("plain.bare-2c")[:64])
    assert not sniff(b"")
    assert sniff(golden("plain.prefixed-second-of-two-streams")[:4])
    assert read_llama(golden("plain.bare-2c"), PLAIN).tokens is None


def test_a_medium_among_the_tokens_is_said_and_its_ids_are_not_made_up() -> None:
    state = read_llama(golden("pictures.3-slot-with-a-picture"), GEOMETRIES["pictures"])
    assert state.tokens is None
    assert state.notes == ("1 media stand among the tokens, which are not taken",)


def test_outputs_of_an_old_session_are_said() -> None:
    assert read_llama(golden("plain.9b"), PLAIN).notes == ("outputs of 1 tokens are not taken",)
    assert read_llama(golden("plain.9c"), PLAIN).notes == ()


@pytest.mark.parametrize(
    ("name", "dtype", "rotation"),
    [
        ("2c", "q8_0", Rotation.UNKNOWN),
        ("3", "q8_0", Rotation.UNKNOWN),
        ("2a", "q8_0", Rotation.NONE),  # older than the rotation
        ("2b", "q8_0", Rotation.NONE),
        ("3", "f16", Rotation.NONE),  # plain rows never are
    ],
)
def test_rotation_is_unknown_only_where_it_may_be(name: str, dtype: str, rotation: Rotation) -> None:
    grammar = BY_NAME[name]
    owners = () if name == "2a" else (0,)
    kv = Kv(tuple(range(30)), (owned((0,), *owners),), grammar.streams, (dtype, 192), (dtype, 192))
    assert read_llama(sequence_file(grammar.version, (7,), kv), SMOLLM2).rotation is rotation


def test_heads_that_64_does_not_divide_are_never_rotated() -> None:
    assert read_llama(golden("plain.3-q8_0"), PLAIN).rotation is Rotation.NONE


def test_windows_that_are_cut_cannot_be_written_into_one_cache_and_whole_ones_can() -> None:
    iswa = GEOMETRIES["iswa"]
    one = replace(NEWEST, grammar=BY_NAME["2a"], merged=True)
    with pytest.raises(Unsupported, match="cannot be in one cache"):
        written(golden("iswa.3"), iswa, one)
    assert written(golden("iswa.2b-one-cache"), iswa, one) == golden("iswa.2a-one-cache")


def test_one_state_is_written_in_every_form_that_holds_it() -> None:
    plain = golden("plain.3")
    file = Container.SEQUENCE_FILE
    session, head = Container.SESSION_FILE, name_of("llama") + outputs((), 0, 0)
    kv = Kv((0, 1), (owned(AT, 0),))
    assert written(plain, PLAIN, Form(file, BY_NAME["2a"])) == golden("plain.2a")
    assert written(plain, PLAIN, Form(file, BY_NAME["2b"])) == golden("plain.2b")
    assert written(plain, PLAIN, Form(file, BY_NAME["2c"])) == golden("plain.2c")
    assert written(plain, PLAIN, Form(file, BY_NAME["2c"], 2, 1, 1)) == golden(
        "plain.2c-second-of-two-streams"
    )
    assert written(plain, PLAIN, replace(NEWEST, packed=True)) == golden("plain.3-slot")
    old = replace(kv, streams=False)
    assert written(plain, PLAIN, Form(session, BY_NAME["9a"])) == session_file(9, IDS, head, old)
    assert written(plain, PLAIN, Form(session, BY_NAME["9b"])) == session_file(9, IDS, head, kv)
    assert written(plain, PLAIN, Form(session, BY_NAME["9c"])) == golden("plain.9c")
    assert written(plain, PLAIN, Form(session, BY_NAME["10"])) == golden("plain.10")
    prefixed = Form(Container.SEQUENCE_STATE, BY_NAME["3"], 2, 1, 1)
    assert written(plain, PLAIN, prefixed) == golden("plain.prefixed-second-of-two-streams")
    assert written(plain, PLAIN, Form(Container.BARE_STATE, BY_NAME["2a"])) == golden("plain.bare-2a")
    assert written(plain, PLAIN, Form(Container.CONTEXT_STATE, BY_NAME["10"])) == golden("plain.context-10")


def test_values_are_laid_as_the_state_says() -> None:
    state = read_llama(golden("plain.3"), PLAIN)
    turned = replace(state, caches=(replace(state.caches[0], transposed=True),))
    assert b"".join(write_sequence_file(turned, PLAIN)) == golden("plain.3-transposed")


def places_of(data: bytes) -> list[list[int]]:
    extension = read_llama(data, GEOMETRIES["pictures"]).caches[0].extension
    assert extension is not None
    return extension.tolist()


def test_what_cells_say_of_pictures_is_kept_and_an_id_that_was_never_said_is_none() -> None:
    pictures, older = GEOMETRIES["pictures"], replace(NEWEST, grammar=BY_NAME["2d"])
    assert places_of(written(golden("pictures.3"), pictures, older)) == [
        [1000, 1001],
        [1010, 1011],
        [1020, 1021],
    ]
    again = written(golden("pictures.2d"), pictures, NEWEST)
    assert places_of(again) == [[1000, 1001, -1], [1010, 1011, -1], [1020, 1021, -1]]


def test_text_under_m_rope_is_at_its_position_in_every_direction() -> None:
    """As llama.cpp writes it: x and y are the position, and the id is the token's."""
    pictures = GEOMETRIES["pictures"]
    assert places_of(written(golden("pictures.2c"), pictures, NEWEST)) == [[0, 0, 11], [1, 1, 12], [2, 2, 13]]
    state = read_llama(golden("pictures.2c"), pictures)
    nameless = b"".join(write_sequence_file(replace(state, tokens=None), pictures))
    assert places_of(nameless) == [[0, 0, -1], [1, 1, -1], [2, 2, -1]]


def test_places_that_are_not_known_are_not_made_up() -> None:
    state = read_llama(golden("pictures.2c"), GEOMETRIES["pictures"])
    [cells] = state.caches
    together = replace(cells, positions=np.zeros(3, np.int64))
    with pytest.raises(Unsupported, match="more than a position"):
        write_sequence_file(replace(state, caches=(together,)), GEOMETRIES["pictures"])
    with pytest.raises(Unsupported, match="more than a position"):
        write_sequence_file(read_llama(golden("tokens.2d"), GEOMETRIES["tokens"]), GEOMETRIES["tokens"])


def test_rows_of_another_shape_than_the_models_are_not_written() -> None:
    state = read_llama(golden("plain.3"), PLAIN)
    [cache] = state.caches
    short = replace(cache.rows[0], data=cache.rows[0].data[:, :-2])
    few = replace(cache.rows[0], data=cache.rows[0].data[:-1])
    for rows in ((short, *cache.rows[1:]), (few, *cache.rows[1:]), cache.rows[1:], (*cache.rows, short)):
        with pytest.raises(Unsupported):
            write_sequence_file(replace(state, caches=(replace(cache, rows=rows),)), PLAIN)
    with pytest.raises(Unsupported, match="another order"):
        write_sequence_file(replace(state, order=ValueOrder.OURS), PLAIN)
    quantized = read_llama(golden("plain.3-q8_0"), PLAIN)
    with pytest.raises(Unsupported, match="q8_0 cannot be stored transposed"):
        write_sequence_file(
            replace(quantized, caches=(replace(quantized.caches[0], transposed=True),)), PLAIN
        )
    with pytest.raises(Unsupported, match="caches of a state"):
        write_sequence_file(replace(state, caches=()), PLAIN)
    hybrid = read_llama(golden("hybrid.3"), GEOMETRIES["hybrid"])
    with pytest.raises(Unsupported, match="recurrent state"):
        write_sequence_file(replace(hybrid, point=None), GEOMETRIES["hybrid"])


def test_tokens_of_a_picture_share_a_position_and_differ_in_their_place() -> None:
    cells = read_llama(golden("pictures.3-one-place-in-time"), GEOMETRIES["pictures"]).caches[0]
    assert cells.positions.tolist() == [5, 5, 5]
    assert cells.extension is not None
    assert np.unique(cells.extension[:, 0]).tolist() == [0, 1, 2]


def test_nothing_of_one_sequence_is_in_the_state_of_another() -> None:
    both = golden("plain.10-two-sequences")
    first, other = (read_llama(both, PLAIN, each) for each in (0, 3))
    assert first.caches[0].positions.tolist() == [0, 1]
    assert other.caches[0].positions.tolist() == [0, 1, 2]
    assert torch.equal(first.caches[0].rows[0].data[0], other.caches[0].rows[0].data[0])
    assert not torch.equal(first.caches[0].rows[0].data[1], other.caches[0].rows[0].data[1])


def test_packed_tokens_of_another_version_are_refused() -> None:
    words = packed(IDS)
    words[1] = 2
    with pytest.raises(UnknownVersion, match="packed by version 2"):
        read_llama(sequence_file(3, words, Kv((0, 1), (owned(AT, 0),))), PLAIN)


def test_gemma_in_one_cache_comes_as_two() -> None:
    one = Kv(tuple(range(18)), (owned((0, 1)),), False, ("f16", 256), ("f16", 256))
    state = read_llama(sequence_file(2, (1, 2), one), GEMMA3)
    assert [len(cells.rows) for cells in state.caches] == [6, 30]
    assert i32(0, 1) == state.caches[1].positions.astype("<i4").tobytes()
    form = state.details[FORM]
    assert isinstance(form, Form)
    assert form.merged
