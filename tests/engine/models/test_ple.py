"""The dilated convolution of per-layer embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from engine.models.ple import DilatedConv


@given(st.integers(2, 4), st.integers(1, 4), st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_a_dilated_convolution_is_the_same_however_the_tokens_are_cut(
    kernel: int, dilation: int, chunks: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((5, kernel), generator=generator)
    x = torch.randn((2, sum(chunks), 5), generator=generator)
    conv = DilatedConv(weight, dilation)
    state, outs = torch.zeros((2, *conv.state_shape)), []
    for part in x.split(chunks, dim=1):
        out, states = conv(part, state, 1)
        state = states[:, -1]
        outs.append(out)
    padded = F.pad(x.transpose(1, 2), ((kernel - 1) * dilation, 0))
    expected = F.conv1d(padded, weight[:, None], groups=5, dilation=dilation).transpose(1, 2)
    torch.testing.assert_close(torch.cat(outs, 1), expected, atol=1e-5, rtol=0)
    assert torch.equal(state, padded[..., -conv.state_shape[0] :].transpose(1, 2))
    whole, newest = torch.zeros((2, *conv.state_shape)), min(3, sum(chunks))
    _, states = conv(x, whole, newest)
    for back in range(newest):
        _, there = conv(x[:, : sum(chunks) - back], whole, 1)
        assert torch.equal(states[:, newest - 1 - back], there[:, -1])
