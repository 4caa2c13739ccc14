"""RoPE: exact at any distance, whatever it is rounded to later; moved keys are keys of where they are."""

from __future__ import annotations

import math

import pytest
import torch

from engine.errors import WeightsRefused
from engine.rope import RopeScaling, Rotary, build_rotary, llama3_factors

PLAIN = RopeScaling()


def rows(tokens: int, size: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn((tokens, 2, size), generator=torch.Generator().manual_seed(seed))


def turned(x: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """The definition: pairs (i, i + n_rot/2) as complex numbers times e^(i * angle), the angle in float32."""
    half = rotary.n_rot // 2
    wide = x.double()
    angle = (positions.float()[:, None] * rotary.inv_freq).double()
    spin = torch.polar(torch.full_like(angle, rotary.magnitude), angle)[:, None]
    pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * spin
    return torch.cat((pairs.real, pairs.imag, wide[..., 2 * half :]), -1)


@pytest.mark.parametrize("n_rot", [64, 32, 2])
@pytest.mark.parametrize("magnitude", [1.0, 1.25])
def test_rotation_is_its_definition(n_rot: int, magnitude: float) -> None:
    rotary = Rotary(build_rotary(n_rot, 10000.0, PLAIN, 8192).inv_freq, magnitude)
    x, positions = rows(5), torch.tensor([0, 1, 17, 4095, 130_000])
    torch.testing.assert_close(rotary.rotate(x, positions).double(), turned(x, rotary, positions))


def test_frequencies_are_the_formula_in_float32() -> None:
    rotary = build_rotary(64, 10000.0, PLAIN, 8192)
    expected = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert rotary.inv_freq.dtype == torch.float32
    torch.testing.assert_close(rotary.inv_freq.double(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("position", [4000, 8191, 131_071])
def test_bf16_keys_are_as_near_as_bf16_can_be_at_far_positions(position: int) -> None:
    rotary = build_rotary(64, 10000.0, PLAIN, 8192)
    x, positions = rows(3).bfloat16(), torch.full((3,), position)
    exact = turned(x, rotary, positions)
    error = (rotary.rotate(x, positions).double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-5).all()


def test_rounded_frequencies_would_be_seen() -> None:
    """The mistake that the law above is about is larger than its tolerance by far."""
    rotary = build_rotary(64, 10000.0, PLAIN, 8192)
    rounded = Rotary(rotary.inv_freq.bfloat16().float())
    x, positions = rows(3), torch.full((3,), 4000)
    assert (rounded.rotate(x, positions) - rotary.rotate(x, positions)).abs().max() > 1


@pytest.mark.parametrize("delta", [-1000, -1, 0, 5, 3000])
@pytest.mark.parametrize("magnitude", [1.0, 1.25])
def test_moving_a_key_is_rotating_it_elsewhere(delta: int, magnitude: float) -> None:
    rotary = Rotary(build_rotary(32, 10000.0, PLAIN, 8192).inv_freq, magnitude)
    x, positions = rows(4), torch.tensor([1000, 1001, 2000, 4000])
    moved = rotary.rerotate(rotary.rotate(x, positions), torch.full((4,), delta))
    torch.testing.assert_close(moved, rotary.rotate(x, positions + delta), atol=2e-3, rtol=0)


def test_each_key_moves_by_its_own_distance() -> None:
    rotary = build_rotary(64, 10000.0, PLAIN, 8192)
    x, positions, deltas = rows(3), torch.tensor([10, 20, 30]), torch.tensor([-10, 0, 12])
    moved = rotary.rerotate(rotary.rotate(x, positions), deltas)
    torch.testing.assert_close(moved, rotary.rotate(x, positions + deltas), atol=2e-6, rtol=1e-5)


def test_scores_depend_on_distance_alone() -> None:
    rotary = build_rotary(64, 10000.0, PLAIN, 8192)
    q, k = rows(1, seed=1), rows(1, seed=2)

    def score(at: int, distance: int) -> float:
        turned_q = rotary.rotate(q, torch.tensor([at + distance]))
        return float((turned_q * rotary.rotate(k, torch.tensor([at]))).sum())

    for distance in (0, 1, 100):
        assert score(0, distance) == pytest.approx(score(5000, distance), abs=2e-3)


def test_dtype_and_shape_are_those_of_the_input() -> None:
    rotary = build_rotary(32, 10000.0, PLAIN, 8192)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = rows(3).to(dtype)
        assert rotary.rotate(x, torch.arange(3)).dtype == dtype
        assert rotary.rerotate(x, torch.arange(3)).shape == x.shape


def test_linear_scaling_divides_positions() -> None:
    x, positions = rows(3), torch.tensor([8, 80, 800])
    stretched = build_rotary(64, 10000.0, RopeScaling("linear", 8.0), 8192)
    plain = build_rotary(64, 10000.0, PLAIN, 8192)
    torch.testing.assert_close(stretched.rotate(x, positions), plain.rotate(x, positions // 8))


def test_llama3_leaves_short_waves_and_divides_long_ones() -> None:
    scaling = RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    plain = build_rotary(64, 10000.0, PLAIN, 8192).inv_freq
    factors = llama3_factors(plain, scaling)
    waves = 2 * math.pi / plain
    assert (factors[waves < 64 / 4] == 1).all()
    assert (factors[waves > 64 / 1] == 8).all()
    between = factors[(waves > 16) & (waves < 64)]
    assert len(between)
    assert ((between > 1) & (between < 8)).all()
    assert (factors.diff() >= 0).all()


def test_llama3_factors_from_a_file_are_taken_as_they_are() -> None:
    factors = torch.linspace(1, 8, 32)
    rotary = build_rotary(64, 10000.0, RopeScaling("llama3", factors=factors), 8192)
    assert torch.equal(rotary.inv_freq, build_rotary(64, 10000.0, PLAIN, 8192).inv_freq / factors)


def test_longrope_divides_by_its_factors_and_raises_the_magnitude() -> None:
    scaling = RopeScaling("longrope", 4.0, 64, factors=torch.full((32,), 2.0))
    rotary = build_rotary(64, 10000.0, scaling, 256)
    assert torch.equal(rotary.inv_freq, build_rotary(64, 10000.0, PLAIN, 256).inv_freq / 2)
    assert rotary.magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_dynamic_scaling_is_one_base_for_the_whole_context() -> None:
    scaling = RopeScaling("dynamic", 2.0, 1024)
    plain = build_rotary(64, 10000.0, PLAIN, 4096).inv_freq
    assert torch.equal(build_rotary(64, 10000.0, scaling, 1024).inv_freq, plain)
    base = 10000.0 * (2 * 4096 / 1024 - 1) ** (64 / 62)
    expected = build_rotary(64, base, PLAIN, 4096).inv_freq
    torch.testing.assert_close(build_rotary(64, 10000.0, scaling, 4096).inv_freq, expected)


@pytest.mark.parametrize(
    ("n_rot", "scaling", "named"),
    [
        (63, PLAIN, "even"),
        (0, PLAIN, "even"),
        (64, RopeScaling("stretchy"), "stretchy"),
        (64, RopeScaling("yarn", 4.0), "original context"),
        (64, RopeScaling("longrope", 4.0, 64), "no factors"),
        (64, RopeScaling("llama3", factors=torch.ones(3)), "3 for 32"),
    ],
    ids=["odd", "none", "unknown", "no original", "no factors", "other count"],
)
def test_what_makes_no_sense_is_refused_by_name(n_rot: int, scaling: RopeScaling, named: str) -> None:
    with pytest.raises(WeightsRefused, match=named):
        build_rotary(n_rot, 10000.0, scaling, 8192)
