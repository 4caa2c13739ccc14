"""A pass of fixed shape is the same pass for a token, whatever is beside it; and what that rests on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.batch import NUM_PLACES, Batch, Segment, Ubatch, split_placed, split_simple
from engine.linear import Linear
from engine.placing import PlacedView, Places, run_pass
from engine.shapes import fixed_shapes, shapes_are_fixed
from engine.state import SeqId


@dataclass
class Asked:
    """A trunk that says of every row its token and position, and keeps what it was asked."""

    passes: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    fixed: list[bool] = field(default_factory=list)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: Any, outputs: torch.Tensor
    ) -> torch.Tensor:
        self.passes.append((tokens.tolist(), positions.tolist(), outputs.tolist()))
        return self.logits_of(self.hidden(tokens, positions, view)[outputs])

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, view: Any) -> torch.Tensor:
        self.fixed.append(shapes_are_fixed())
        return torch.stack((tokens, positions), 1).float()

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 100


class Rows:
    """A view that shows what reaches it: attention gives back its queries."""

    def __init__(self, ubatch: Ubatch) -> None:
        self.segments = ubatch.segments
        self.positions = ubatch.positions
        self.appended: list[torch.Tensor] = []
        self.chosen: Any = None

    def attend(self, layer: int, q: torch.Tensor, k: Any, v: Any, scale: float, *_: Any, **more: Any) -> Any:
        self.appended += [x for x in (k, v) if x is not None]
        self.chosen = more["chosen"]
        return q

    def append(self, name: str, layer: int, rows: torch.Tensor) -> None:
        self.appended.append(rows)

    def held(self, name: str, layer: int, segment: Segment) -> Any:
        return segment

    def previous_tokens(self, count: int) -> Any:
        return np.repeat(self.positions[:, None], count, 1)


def ubatch_of(*positions: tuple[int, int], outputs: bool = True) -> Ubatch:
    """The only pass of (sequence, position) rows whose tokens number them from 1."""
    seqs, at = np.array(positions, np.int64).T
    wanted = np.full(len(seqs), outputs)
    (ubatch,) = split_placed(Batch(np.arange(1, len(seqs) + 1), at, seqs, wanted), 64)
    return ubatch


def test_the_rows_beside_a_token_are_never_seen_from_outside() -> None:
    model, ubatch = Asked(), ubatch_of((0, 13), (0, 14), (1, 3))
    logits, hidden = run_pass(model, None, ubatch, Rows(ubatch))  # type: ignore[arg-type]
    assert logits.tolist() == [[101, 113], [102, 114], [103, 103]]
    assert hidden is None
    ((tokens, positions, outputs),) = model.passes
    assert tokens == [1, 1, 1, 3, 1, 1, 2, 1]
    assert positions == [13, 13, 13, 3, 13, 13, 14, 13]
    assert outputs == list(range(NUM_PLACES))


def test_logits_are_computed_of_all_rows_or_of_none() -> None:
    for wanted, outputs in (([False, True], NUM_PLACES), ([False, False], 0)):
        batch = Batch(np.array([1, 2]), np.array([6, 7]), np.array([0, 0]), np.array(wanted))
        (ubatch,) = split_placed(batch, 64)
        model = Asked()
        logits, _ = run_pass(model, None, ubatch, Rows(ubatch))  # type: ignore[arg-type]
        assert len(model.passes[0][2]) == outputs
        assert logits.tolist() == ([[102, 107]] if outputs else [])


def test_hidden_states_are_those_of_the_tokens_in_their_order() -> None:
    model, ubatch = Asked(), ubatch_of((0, 7), (0, 8))
    logits, hidden = run_pass(model, model, ubatch, Rows(ubatch))  # type: ignore[arg-type]
    assert hidden is not None
    assert hidden.tolist() == [[1, 7], [2, 8]]
    assert logits.tolist() == [[101, 107], [102, 108]]


def test_shapes_are_fixed_in_such_a_pass_alone() -> None:
    model, ubatch = Asked(), ubatch_of((0, 7))
    (plain,) = split_simple(ubatch.batch, 64)
    for one in (ubatch, plain):
        run_pass(model, None, one, Rows(one))  # type: ignore[arg-type]
    assert model.fixed == [True, False]
    assert not shapes_are_fixed()


def test_a_view_of_a_pass_puts_rows_where_they_belong_on_both_ways() -> None:
    ubatch = ubatch_of((0, 6), (0, 9), (1, 4))
    inner = Rows(ubatch)
    assert ubatch.places is not None
    view = PlacedView(inner, Places(ubatch.places))  # type: ignore[arg-type]
    q = torch.arange(NUM_PLACES)[:, None, None]
    chosen = [torch.tensor([at]) for at in range(3)]
    attended = view.attend(0, q, q * 10, None, 1.0, chosen=chosen)
    assert attended[[6, 1, 4]].flatten().tolist() == [6, 1, 4]
    assert inner.appended[0].flatten().tolist() == [60, 10, 40]
    assert inner.chosen is chosen
    view.append("idx.k", 0, q)
    assert inner.appended[1].flatten().tolist() == [6, 1, 4]
    assert [(one.seq, one.start) for one in view.segments] == [(0, 6), (0, 1), (1, 4)]
    assert [view.held("idx.k", 0, one) for one in view.segments] == list(ubatch.segments)
    assert view.positions[[6, 1, 4]].tolist() == [6, 9, 4]
    assert view.previous_tokens(2)[[6, 1, 4]].tolist() == [[6, 6], [9, 9], [4, 4]]
    assert ubatch.segments[0].seq == SeqId(0)


# -- what it rests on: of tensors of one shape, a row gives the same bits whatever the others hold -------


def packed(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return Linear(torch.randn(1536, 576).to(dtype))


def plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.randn(1536, 576).to(dtype)
    return lambda x: F.linear(x, weight)


def by_heads(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.randn(9, 64, 48).to(dtype)
    return lambda x: torch.bmm(x.view(NUM_PLACES, 9, 64).transpose(0, 1), weight).transpose(0, 1)


def elementwise(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.gelu(F.silu(x)[:, :37].contiguous())


def over_rows(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.rms_norm(x, (576,)).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("law", [packed, plain, by_heads, elementwise, over_rows])
def test_a_row_gives_the_same_bits_whatever_the_other_rows_hold(law: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    apply = law(dtype)
    x = torch.randn(NUM_PLACES, 576).to(dtype)
    expected = apply(x)
    for row in range(NUM_PLACES):
        for others in (x[row], torch.randn(NUM_PLACES, 576), torch.full((576,), torch.nan)):
            beside = torch.empty_like(x).copy_(others)
            beside[row] = x[row]
            assert torch.equal(apply(beside)[row], expected[row])


def test_shapes_are_free_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), fixed_shapes():
        raise ZeroDivisionError
    assert not shapes_are_fixed()
