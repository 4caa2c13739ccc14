"""Hyper-connections against their formula, number by number in float64."""

from __future__ import annotations

import pytest
import torch

from engine.models.hyper import HyperConnection, HyperHead, sinkhorn, weights_of

N, WIDTH, TOKENS = 3, 5, 4
#: larger than any file's, so that each place where it stands shows
EPS = 0.1


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_formula(scores: torch.Tensor, iterations: int) -> list[list[float]]:
    """One matrix [from][to]."""
    mix = []
    for row in scores.tolist():
        powers = torch.tensor(row, dtype=torch.float64).exp()
        mix.append([float(x) / float(powers.sum()) + EPS for x in powers])
    for step in range(2 * iterations - 1):
        if step % 2 == 0:
            sums = [sum(mix[i][j] for i in range(N)) + EPS for j in range(N)]
            mix = [[mix[i][j] / sums[j] for j in range(N)] for i in range(N)]
        else:
            sums = [sum(row) + EPS for row in mix]
            mix = [[x / sums[i] for x in mix[i]] for i in range(N)]
    return mix


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_eps_stands_in_all_its_places(iterations: int) -> None:
    scores = drawn(TOKENS, N, N)
    mix = sinkhorn(scores, iterations, EPS)
    for token in range(TOKENS):
        expected = torch.tensor(by_formula(scores[token], iterations))
        assert torch.allclose(mix[token], expected, atol=1e-6)


def test_columns_sum_to_one_and_rows_nearly() -> None:
    mix = sinkhorn(drawn(TOKENS, N, N), 20, 1e-6)
    assert torch.allclose(mix.sum(-2), torch.ones(TOKENS, N), atol=1e-5)
    assert torch.allclose(mix.sum(-1), torch.ones(TOKENS, N), atol=1e-2)


def test_a_block_reads_and_writes_the_streams_as_the_formula_says() -> None:
    count = (2 + N) * N
    matrix, base, scale = drawn(count, N * WIDTH), drawn(count, seed=1), drawn(3, seed=2)
    streams, output = drawn(TOKENS, N, WIDTH, seed=3), drawn(TOKENS, WIDTH, seed=4)
    crossing = HyperConnection(matrix, base, scale, 4, EPS, 1e-6)(streams)
    after = crossing.passed(output)
    weights = weights_of(streams, matrix, 1e-6)
    for token in range(TOKENS):
        w = [weights[token, i] * scale[0 if i < N else 1 if i < 2 * N else 2] + base[i] for i in range(count)]
        reading = sum((torch.sigmoid(w[i]) + EPS) * streams[token, i] for i in range(N))
        assert torch.allclose(crossing.input[token], reading, atol=1e-5)
        mix = by_formula(torch.stack(w[2 * N :]).view(N, N), 4)
        for to in range(N):
            mixed = sum(mix[i][to] * streams[token, i] for i in range(N))
            expected = 2 * torch.sigmoid(w[N + to]) * output[token] + mixed
            assert torch.allclose(after[token, to], expected, atol=1e-5)


def test_the_head_reads_all_streams_as_one() -> None:
    matrix, base, scale = drawn(N, N * WIDTH), drawn(N, seed=1), drawn(1, seed=2)
    streams = drawn(TOKENS, N, WIDTH, seed=3)
    read = HyperHead(matrix, base, scale, EPS, 1e-6)(streams)
    flat = streams.flatten(1)
    normal = flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + 1e-6)
    gates = torch.sigmoid(normal @ matrix.T * scale + base) + EPS
    assert torch.allclose(read, torch.einsum("tn,tnw->tw", gates, streams), atol=1e-5)
