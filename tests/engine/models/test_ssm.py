"""What all families with state-space layers share: texts of many pieces, and neighbours in a pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.state import PartKind
from tests.engine.reading import read_all
from tests.oracles.base import open_engine, reference, tokens, write

#: how far float32 logits may be from the reference's
FAMILIES = {
    "bamba": 1e-4,
    "falcon_h1": 1e-4,
    "falcon_mamba": 1e-4,
    "granitemoehybrid": 1e-4,
    "jamba": 1e-4,
    "mamba": 1e-4,
    "mamba2": 1e-4,
    "nemotron_h": 1e-4,
    "zamba2": 5e-4,
}
LONG = 200


@pytest.mark.parametrize(("family", "atol"), FAMILIES.items())
def test_a_long_text_in_one_pass(tmp_path: Path, family: str, atol: float) -> None:
    write(family, tmp_path)
    ids = tokens(3, LONG)
    ((_, ours),) = read_all(open_engine(tmp_path, max_batch=LONG, max_ubatch=LONG), ids, (LONG,))
    assert (ours - reference(family, ids)).abs().max() < atol


@pytest.mark.parametrize(("family", "atol"), FAMILIES.items())
def test_sequences_side_by_side_at_different_positions(tmp_path: Path, family: str, atol: float) -> None:
    """In one pass, over borders of pieces that fall elsewhere in each, and one token at a time."""
    write(family, tmp_path)
    engine = open_engine(tmp_path, max_batch=256, max_ubatch=256)
    texts = {engine.create(): tokens(seed, start + 72) for seed, start in enumerate((1, 30, 65))}
    for seq, ids in texts.items():
        engine.advance({seq: ids[:-72]})
    for step in (70, 1, 1):
        engine.advance({seq: ids[engine.length(seq) :][:step] for seq, ids in texts.items()})
        for seq, ids in texts.items():
            ours = engine.logits(seq)
            assert ours is not None
            assert (ours - reference(family, ids[: engine.length(seq)])[-1]).abs().max() < atol


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_without_attention_there_is_state_at_a_point_alone(tmp_path: Path, family: str) -> None:
    """The same bytes however long the text is, and positions are counted all the same."""
    write(family, tmp_path)
    engine = open_engine(tmp_path)
    assert {part.kind for part in engine.layout} == {PartKind.POINT}
    seq = engine.create()
    sizes = set()
    for count in (5, 35):
        engine.advance({seq: tokens(1, count)})
        state = engine.snapshot(seq)
        assert state.rows == ()
        sizes.add(sum(part.numel() for point in state.points for part in point.parts))
    assert engine.length(seq) == 40
    assert len(sizes) == 1


def test_bf16_keeps_the_state_in_float32(tmp_path: Path) -> None:
    write("mamba2", tmp_path)
    engine = open_engine(tmp_path, dtype="bf16")
    assert {part.dtype for part in engine.layout} == {"f32"}
    ((_, ours),) = read_all(engine, tokens(), (64,))
    assert (ours - reference("mamba2", tokens())).abs().max() < 0.2
    assert torch.isfinite(ours).all()
