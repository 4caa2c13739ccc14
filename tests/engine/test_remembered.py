"""What an engine with rows of other dtypes would be like is what such an engine is like."""

from __future__ import annotations

import pytest
import torch

from engine.cache.quant import Hadamard
from engine.cache.rows import RowBuffer, Slot
from engine.errors import ConfigError
from engine.state import PartKind
from serialization.reencode.converting import PartConverter
from tests.exact.members import MEMBERS, open_member

HOST = torch.device("cpu")


@pytest.mark.parametrize("family", MEMBERS)
def test_a_form_is_that_of_an_engine_with_these_dtypes(family: str) -> None:
    member = MEMBERS[family]
    engine = open_member(family, "f32")
    for dtype in member.dtypes:
        other = open_member(family, dtype)
        form = engine.form(dtype, dtype)
        assert form.layout == other.layout
        assert dict(form.meaning) == dict(other.fingerprint.meaning)
        assert dict(form.rotated) == dict(other.remembered.rotated)
        assert other.form("f32", "f32").layout == engine.layout


def test_keys_and_values_have_dtypes_of_their_own() -> None:
    form = open_member("llama", "f32").form("q8_0", "bf16")
    assert {spec.name.rpartition(".")[0]: spec.dtype for spec in form.layout} == {
        "kv.k": "q8_0",
        "kv.v": "bf16",
    }
    assert (form.meaning["type_k"], form.meaning["type_v"]) == ("q8_0", "bf16")


def test_what_rows_cannot_be_stored_as_is_refused() -> None:
    engine = open_member("llama", "f32")
    with pytest.raises(ConfigError, match="type_k"):
        engine.form("i64", "f32")


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "deepseek_v3", "deepseek_v32", "deepseek_v4", "minimax_m3"]
)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0", "q5_0", "q4_0"])
def test_converted_rows_are_those_that_the_engine_would_store(family: str, dtype: str) -> None:
    """To the bit: of the same values, in the dtype and the rotation of every part that it has."""
    engine = open_member(family, "f32")
    try:
        after = engine.form(dtype, dtype)
    except ConfigError:
        pytest.skip(f"rows of {family} are too narrow for {dtype}")
    before = engine.form("f32", "f32")
    generator = torch.Generator().manual_seed(3)
    for old, new in zip(before.layout, after.layout, strict=True):
        if old.kind is PartKind.POINT:
            continue
        values = torch.randn((40, old.num_values), generator=generator)
        heads = values.view(40, -1, old.shape[-1])
        theirs = [
            _written(heads, spec.dtype, form.rotated.get(spec.name, 0))
            for spec, form in ((old, before), (new, after))
        ]
        blocks = before.rotated.get(old.name, 0), after.rotated.get(new.name, 0)
        assert torch.equal(PartConverter(old, new, blocks).convert(theirs[0]), theirs[1])


def _written(heads: torch.Tensor, dtype: str, block: int) -> torch.Tensor:
    """The bytes that a buffer of the engine's has of these rows."""
    hadamard = Hadamard(block, HOST) if block else None
    num, size = heads.shape[1], heads.shape[2]
    buffer = RowBuffer(len(heads), num, size, dtype, torch.float32, HOST, "type_k", hadamard)
    slot = Slot(0, len(heads), None)
    buffer.write(slot, heads)
    return buffer.read_bytes(slot)
