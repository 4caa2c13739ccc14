"""Rows of other dtypes: made as an engine makes them, and what that costs is measured and stated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from engine.errors import ConfigError, FingerprintMismatch, LimitExceeded
from engine.state import NextLogits, PartKind, PartSpec, Provenance, Span, parts_of
from serialization.hadamard import rotate
from serialization.losses import Loss
from serialization.manifest import Manifest
from serialization.pipelines import RAW
from serialization.reencode.forms import MemoryForm
from serialization.reencode.plan import Fate
from serialization.reencode.planning import plan_reencoding
from serialization.reencode.reencode import reencode
from serialization.reencode.reencoding import ROW_DTYPES, Reencoding
from serialization.snapshot import read_state
from serialization.values import decode, encode
from tests.serialization.reencode.stored import HEAD, form, numbers, rows_of, state, stored
from tests.serialization.states import CountingStore, drafted

LENGTH = 600
PAIRS = [(a, b) for a, b in itertools.product(ROW_DTYPES, ROW_DTYPES) if a != b]
EXACT = {("f16", "f32"), ("bf16", "f32")}


def basis(made: MemoryForm, spec: PartSpec, values: torch.Tensor) -> torch.Tensor:
    """Plain values as the part has them, and back."""
    return rotate(values.view(len(values), -1, HEAD), made.rotated.get(spec.name, 0)).view(values.shape)


def converted(before: str, after: str, length: int = LENGTH) -> tuple[CountingStore, Manifest, Manifest]:
    """A state with both K and V of one dtype, and the same with another."""
    store = CountingStore()
    source = stored(state(length, before, before), store)
    return store, source, reencode(store, source, store, Reencoding(type_k=after, type_v=after), form)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_rows_are_those_of_their_values_and_the_loss_is_what_it_is(before: str, after: str) -> None:
    store, source, made = converted(before, after)
    old, new = form(before, before), form(after, after)
    assert made.layout == new.layout
    assert made.fingerprint.meaning == new.meaning
    assert made.fingerprint.making == source.fingerprint.making
    assert made.spans == (Span(0, LENGTH, Provenance.REENCODED),)
    assert Manifest.decode(made.encode()) == made
    (loss,) = made.reencoded
    assert loss.length == LENGTH
    told = {(part.name, part.layer): part for part in loss.parts}
    assert list(told) == [(spec.name, spec.layer) for spec in old.layout if spec.kind is not PartKind.POINT]
    first, last = read_state(store, source), read_state(store, made)
    for kind in (PartKind.TOKEN, PartKind.BLOCK, PartKind.WINDOW):
        specs = zip(parts_of(old.layout, kind), parts_of(new.layout, kind), strict=True)
        rows = zip(rows_of(first, kind), rows_of(last, kind), strict=True)
        for (was, becomes), (theirs, ours) in zip(specs, rows, strict=True):
            values = decode(before, theirs)
            same = old.rotated.get(was.name, 0) == new.rotated.get(was.name, 0)
            turned = values if same else basis(new, becomes, basis(old, was, values))
            assert torch.equal(ours, encode(after, turned))
            if kind is not PartKind.WINDOW:  # of which not all are read here
                again = decode(after, ours)
                again = again if same else basis(old, was, basis(new, becomes, again))
                apart = (again.double() - values.double()).norm(dim=1)
                size = values.double().norm(dim=1)
                part = told[was.name, was.layer]
                assert (part.before, part.after) == (before, after)
                assert part.greatest == pytest.approx(float((apart / size).max()), abs=1e-12)
                mean = float(apart.square().sum() / size.square().sum())
                assert part.mean_square == pytest.approx(mean, rel=1e-9)
                assert part.is_exact == torch.equal(again, values)
    if (before, after) in EXACT:
        assert loss.is_exact
    assert torch.equal(first.points[-1].parts[0], last.points[-1].parts[0])


@pytest.mark.parametrize(("before", "after"), sorted(EXACT))
def test_what_was_widened_exactly_comes_back_bit_for_bit(before: str, after: str) -> None:
    store, source, made = converted(before, after)
    back = reencode(store, made, store, Reencoding(type_k=before, type_v=before), form)
    assert back.chunks == source.chunks
    assert back.fingerprint == source.fingerprint
    assert [loss.is_exact for loss in back.reencoded] == [True, True]
    assert back.spans[0].provenance is Provenance.REENCODED


def test_more_bits_lose_less() -> None:
    lost = [converted("f32", dtype)[2].reencoded[0].parts for dtype in ("q8_0", "q5_0", "q4_0")]
    for q8, q5, q4 in zip(*lost, strict=True):
        assert 0 < q8.mean_square < q5.mean_square < q4.mean_square < 0.02
        assert 0 < q8.greatest < q5.greatest < q4.greatest < 0.2


def test_rows_that_stay_rotated_are_not_turned_back() -> None:
    """So that what one dtype holds exactly in the rotated basis, another one does not blur."""
    store, source, made = converted("q4_0", "q8_0")
    first, last = read_state(store, source), read_state(store, made)
    for theirs, ours in zip(rows_of(first, PartKind.TOKEN), rows_of(last, PartKind.TOKEN), strict=True):
        assert torch.equal(ours, encode("q8_0", decode("q4_0", theirs)))


def test_keys_and_values_are_converted_apart() -> None:
    store = CountingStore()
    source = stored(state(LENGTH), store)
    made = reencode(store, source, store, Reencoding(type_v="q8_0"), form)
    assert made.layout == form("bf16", "q8_0").layout
    assert [part.name for part in made.reencoded[0].parts] == ["kv.v.00", "kv.v.01"]
    first, last = read_state(store, source), read_state(store, made)
    assert torch.equal(rows_of(first, PartKind.TOKEN)[0], rows_of(last, PartKind.TOKEN)[0])
    assert torch.equal(rows_of(first, PartKind.BLOCK)[0], rows_of(last, PartKind.BLOCK)[0])
    of_blocks = [[blob.ref for blob in chunk.blobs if blob.kind is PartKind.BLOCK] for chunk in source.chunks]
    assert of_blocks == [
        [blob.ref for blob in chunk.blobs if blob.kind is PartKind.BLOCK] for chunk in made.chunks
    ], "blobs without such rows are carried as they are"


def test_point_state_logits_and_canary_stay() -> None:
    store = CountingStore()
    logits = torch.linspace(-3, 3, 50)
    source = stored(replace(state(LENGTH), edge=NextLogits(logits)), store)
    made = reencode(store, source, store, Reencoding(type_k="q4_0"), form)
    assert made.checkpoints == source.checkpoints
    assert made.edge == source.edge
    assert made.canary == source.canary


def test_the_state_it_is_made_of_is_left_alone() -> None:
    store = CountingStore()
    source = stored(state(LENGTH), store)
    encoded, data = source.encode(), {blob: store.get(blob) for blob in store.blobs()}
    reencode(store, source, store, Reencoding(type_k="q4_0"), form)
    assert source.encode() == encoded
    assert all(store.get(blob) == kept for blob, kept in data.items())


def test_all_at_once() -> None:
    store, target = CountingStore(), CountingStore()
    source = stored(state(LENGTH), store)
    wanted = Reencoding("q8_0", "f16", "raw", None, 64, 450)
    made = reencode(store, source, target, wanted, form)
    first, last = read_state(store, source, 450), read_state(target, made)
    assert (made.length, made.chunk_tokens, made.reencoded[0].length) == (450, 64, 450)
    keys = basis(form("q8_0", "f16"), made.layout[0], decode("bf16", rows_of(first, PartKind.TOKEN)[0]))
    assert torch.equal(rows_of(last, PartKind.TOKEN)[0], encode("q8_0", keys))


def test_every_conversion_is_stated_and_no_more_than_so_many() -> None:
    store = CountingStore()
    made = stored(state(20), store)
    dtypes = itertools.cycle(["f32", "bf16"])
    for count in range(1, 65):
        made = reencode(store, made, store, Reencoding(type_k=next(dtypes)), form)
        assert len(made.reencoded) == count
    assert Manifest.decode(made.encode()) == made
    beyond = reencode(store, made, store, Reencoding(type_k="q8_0"), form)
    with pytest.raises(LimitExceeded):
        beyond.encode()


def test_spans_that_were_not_computed_stay_what_they_are() -> None:
    store = CountingStore()
    spans = (
        Span(0, 100, Provenance.SHIFTED),
        Span(100, 200, Provenance.COMPUTED),
        Span(200, 300, Provenance.REENCODED),
        Span(300, 400, Provenance.IMPORTED),
        Span(400, LENGTH, Provenance.COMPUTED),
    )
    source = stored(replace(state(LENGTH), spans=spans), store)
    made = reencode(store, source, store, Reencoding(type_k="q8_0"), form)
    assert made.spans == (
        Span(0, 100, Provenance.SHIFTED),
        Span(100, 300, Provenance.REENCODED),
        Span(300, 400, Provenance.IMPORTED),
        Span(400, LENGTH, Provenance.REENCODED),
    )


def test_a_draft_goes_with_the_dtype_and_the_plan_says_so() -> None:
    store = CountingStore()
    source = stored(drafted(state(LENGTH)), store)
    assert source.draft is not None
    assert reencode(store, source, store, Reencoding(type_k="q8_0"), form).draft is None
    plan = plan_reencoding(source, Reencoding(type_k="q8_0"), form)
    (gone,) = [item for item in plan.items if item.what == "drafts"]
    assert (gone.fate, gone.becomes) == (Fate.DROPPED, 0)
    assert reencode(store, source, store, Reencoding(type_k="bf16"), form).draft == source.draft


def test_the_dtype_that_rows_have_is_no_conversion() -> None:
    store = CountingStore()
    source = stored(state(LENGTH), store)
    assert reencode(store, source, store, Reencoding(type_k="bf16", type_v="bf16")) == source


def test_where_there_are_no_rows_nothing_is_lost() -> None:
    """The ids are read again by an engine with other dtypes."""
    store = CountingStore()
    source = stored(state(LENGTH), store)
    bare = replace(source, chunks=tuple(replace(chunk, blobs=()) for chunk in source.chunks), checkpoints=())
    made = reencode(store, bare, store, Reencoding(type_k="q8_0"), form)
    assert made.layout == form("q8_0", "bf16").layout
    assert (made.reencoded, made.spans) == ((), source.spans)
    empty = stored(state(0), store)
    made = reencode(store, empty, store, Reencoding(type_k="q8_0"), form)
    assert (made.reencoded, made.layout) == ((), form("q8_0", "bf16").layout)


# --- what is refused ----------------------------------------------------------------------------


def test_without_the_model_no_dtype_is_changed() -> None:
    store = CountingStore()
    source = stored(state(LENGTH), store)
    wanted = Reencoding(type_k="q8_0")
    with pytest.raises(ConfigError, match="need the model"):
        reencode(store, source, store, wanted)
    plan = plan_reencoding(source, wanted)
    assert plan.items[0].fate is Fate.REFUSED


def test_another_models_word_is_not_taken() -> None:
    store = CountingStore()
    source = stored(state(LENGTH), store)

    def other(type_k: str, type_v: str) -> MemoryForm:
        right = form(type_k, type_v)
        return replace(right, meaning={**right.meaning, "model": "b3-11"})

    def narrow(type_k: str, type_v: str) -> MemoryForm:
        right = form(type_k, type_v)
        return replace(right, layout=right.layout[:-1])

    with pytest.raises(FingerprintMismatch, match="model = b3-00, this model has b3-11"):
        reencode(store, source, store, Reencoding(type_k="q8_0"), other)
    with pytest.raises(FingerprintMismatch, match="layout"):
        reencode(store, source, store, Reencoding(type_k="q8_0"), narrow)


@pytest.mark.parametrize("dtype", ["i64", "q6_k", ""])
def test_a_dtype_that_rows_cannot_have_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="type_v"):
        Reencoding(type_v=dtype)


@pytest.mark.parametrize("value", [70_000.0, float("inf"), float("nan")])
def test_values_that_a_dtype_has_not_are_refused(value: float) -> None:
    store = CountingStore()
    source = state(LENGTH, "bf16", "bf16")
    parts = list(source.rows[0].parts)
    wide = decode("bf16", parts[1])
    wide[77, 5] = value
    parts[1] = encode("bf16", wide)
    source = replace(source, rows=(replace(source.rows[0], parts=tuple(parts)), *source.rows[1:]))
    kept = stored(source, store, RAW)
    with pytest.raises(ConfigError, match=r"kv\.v\.00: it has values that are none of f16"):
        reencode(store, kept, store, Reencoding(type_v="f16"), form)


def test_rows_of_zeros_lose_nothing() -> None:
    store = CountingStore()
    source = state(LENGTH)
    zeros = tuple(
        replace(run, parts=tuple(torch.zeros_like(part) for part in run.parts)) for run in source.rows
    )
    kept = stored(replace(source, rows=zeros), store)
    made = reencode(store, kept, store, Reencoding(type_k="q4_0", type_v="q8_0"), form)
    assert made.reencoded[0].is_exact
    assert isinstance(made.reencoded[0], Loss)


# --- the plan -----------------------------------------------------------------------------------


def test_a_plan_says_what_becomes_of_the_bytes() -> None:
    store = CountingStore()
    source = stored(state(LENGTH, window_start=300), store)
    plan = plan_reencoding(source, Reencoding(type_k="q8_0", codec="raw"), form)
    assert not plan.refusals
    fates = {item.what: item for item in plan.items}
    keys, values = fates["layers of token rows kv.k"], fates["layers of token rows kv.v"]
    assert (keys.fate, keys.nbytes, keys.becomes) == (Fate.CONVERTED, LENGTH * 256, LENGTH * 136)
    assert keys.why == "bf16 to q8_0, with a loss that is measured and stated"
    assert (values.fate, values.nbytes, values.becomes) == (Fate.KEPT, LENGTH * 256, LENGTH * 256)
    assert fates["layers of block rows pool.k"].becomes == LENGTH // 48 * 68
    assert fates["layers of window rows kv.k"].becomes == 300 * 136
    assert (fates["checkpoints"].count, fates["checkpoints"].becomes) == (12, 12 * 12)
    made = reencode(store, source, store, plan.wanted, form)
    assert plan.nbytes == sum(ref.raw_nbytes for ref in made.blobs())
    assert not any(store.got.count(ref.blob) > 1 for ref in source.blobs()), "a plan reads nothing"


def test_what_is_planned_is_told_exact_where_it_is() -> None:
    plan = plan_reencoding(stored(state(LENGTH), CountingStore()), Reencoding(type_k="f32"), form)
    whys = [item.why for item in plan.items if item.fate is Fate.CONVERTED]
    assert whys == ["bf16 to f32, exactly"] * 3


def test_what_is_lost_of_a_conversion_is_not_lost_of_the_numbers() -> None:
    """The numbers of the tests are ordinary ones: in every dtype, and none of them zero."""
    for dtype in ROW_DTYPES:
        spec = PartSpec("k", PartKind.TOKEN, 0, dtype, (2, HEAD))
        values = decode(dtype, numbers(spec, 0, 50))
        assert values.abs().max() < 2.5
        assert len(values.unique()) > 10
