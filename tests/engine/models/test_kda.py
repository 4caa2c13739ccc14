"""How channels forget: the laws alone, beside those of transformers, and in the recurrence."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

from engine.models.kda import Bounded, Unbounded
from engine.models.scan.delta import gated_delta_rule, unit
from tests.oracles.kda import bounded_decays, recurrence

HEADS, SIZE, TOKENS, BOUND = 3, 8, 100, -5.0


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bound", [None, BOUND])
def test_the_laws_are_those_of_transformers(bound: float | None) -> None:
    config = Glm5NextTextConfig(
        hidden_size=16, linear_num_heads=HEADS, linear_head_dim=SIZE, linear_lower_bound=bound
    )
    gate = Glm5NextTextForgetGate(config)
    x, log_speed, dt = drawn(1, TOKENS, 16, scale=4), drawn(HEADS, seed=1), drawn(HEADS, SIZE, seed=2)
    with torch.no_grad():
        for parameter in (gate.f_a_proj.weight, gate.f_b_proj.weight):
            parameter.copy_(drawn(*parameter.shape, seed=3))
        gate.A_log.copy_(log_speed)
        gate.dt_bias.copy_(dt.view(-1))
        theirs = gate(x)
        f = gate.f_b_proj(gate.f_a_proj(x)).view(1, TOKENS, HEADS, SIZE)
    speed = log_speed.exp()[:, None]
    law = Unbounded(speed, dt) if bound is None else Bounded(speed, dt, bound)
    assert theirs.std() > 0.5
    assert torch.allclose(law(f), theirs, atol=1e-4, rtol=1e-5)
    if bound is not None:
        assert torch.allclose(bounded_decays(f[0], log_speed, dt, bound).float(), theirs[0], atol=1e-5)


@pytest.mark.parametrize("scale", [0.1, 1.0, 50.0])
def test_bounded_forgetting_in_pieces_is_the_plain_recurrence(scale: float) -> None:
    q, k = unit(drawn(TOKENS, HEADS, SIZE)), unit(drawn(TOKENS, HEADS, SIZE, seed=1))
    v, beta = drawn(TOKENS, HEADS, SIZE, seed=2), torch.sigmoid(drawn(TOKENS, HEADS, seed=3))
    f, log_speed, dt = (
        drawn(TOKENS, HEADS, SIZE, seed=4, scale=scale),
        drawn(HEADS, seed=5),
        drawn(HEADS, SIZE),
    )
    expected = recurrence(q, k, v, bounded_decays(f, log_speed, dt, BOUND), beta)
    law = Bounded(log_speed.exp()[:, None], dt, BOUND)
    rows = [x[None] for x in (q, k, v, law(f), beta)]
    ours, _ = gated_delta_rule((0,), torch.zeros(1, HEADS, SIZE, SIZE), *rows, 1)
    assert torch.allclose(ours[0].double(), expected, atol=1e-5)


def test_nothing_is_forgotten_faster_than_the_bound() -> None:
    f = torch.tensor([-1e30, -50.0, 0.0, 50.0, 1e30]).view(1, 5, 1, 1)
    decays = Bounded(torch.ones(1, 1), torch.zeros(1, 1), BOUND)(f).flatten()
    assert decays.tolist() == pytest.approx([0, 0, BOUND / 2, BOUND, BOUND], abs=1e-6)
