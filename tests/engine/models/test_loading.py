"""What is done to tensors on their way from the file to the model."""

from __future__ import annotations

import torch

from engine.models.loading import halves_of_pairs
from engine.rope import RopeScaling, build_rotary

HEADS, SIZE, N_ROT, START = 3, 12, 6, 4


def in_pairs(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """`x` [heads, size] with value START + 2i turned with the next one by `turns` [N_ROT/2] radians."""
    out = x.clone()
    for i, turn in enumerate(turns.tolist()):
        at = START + 2 * i
        a, b, angle = x[:, at], x[:, at + 1], torch.tensor(turn)
        out[:, at] = a * angle.cos() - b * angle.sin()
        out[:, at + 1] = a * angle.sin() + b * angle.cos()
    return out


def test_scores_of_pairs_and_of_halves_are_the_same() -> None:
    torch.manual_seed(0)
    rotary = build_rotary(N_ROT, 100.0, RopeScaling(), 64)
    x, wq, wk = torch.randn(5), torch.randn(HEADS * SIZE, 5), torch.randn(HEADS * SIZE, 5)
    sides = []
    for weight, position in ((wq, 11), (wk, 4)):
        heads = (halves_of_pairs(weight, SIZE, N_ROT, START) @ x).view(1, HEADS, SIZE)
        turned = rotary.rotate(heads[..., START : START + N_ROT], torch.tensor([position]))
        halves = torch.cat((heads[..., :START], turned, heads[..., START + N_ROT :]), -1)[0]
        sides.append((in_pairs((weight @ x).view(HEADS, SIZE), position * rotary.inv_freq), halves))
    (q_pairs, q_halves), (k_pairs, k_halves) = sides
    torch.testing.assert_close((q_halves * k_halves).sum(-1), (q_pairs * k_pairs).sum(-1))
    assert not torch.allclose(q_halves, q_pairs), "the order did change"


def test_values_outside_of_the_turned_ones_stay_where_they_are() -> None:
    rows = torch.arange(2 * SIZE)
    moved = halves_of_pairs(rows, SIZE, N_ROT, START)
    assert moved.tolist()[:SIZE] == [0, 1, 2, 3, 4, 6, 8, 5, 7, 9, 10, 11]
    assert moved.tolist()[SIZE:] == [SIZE + value for value in moved.tolist()[:SIZE]]
