"""Per-layer embeddings: features of the last few tokens, looked up by their hash and added to every residual
stream as far as it agrees with them, with a dilated convolution over the tokens before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import PointSpec, View
from engine.cache.trail import newest_windows
from engine.errors import WeightsRefused
from engine.linear import Linear
from engine.models.base import WeightSource
from engine.models.hyper_lowrank import StreamNorm, StreamSizes, load_stream_norm
from engine.models.loading import Loader
from engine.models.ngram import NgramHash

CONV = "ple.conv"

#: The gate's root is taken of no less than this.
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class DilatedConv:
    """A causal filter for each channel, `weight` [channels, kernel], whose taps are `dilation` tokens apart;
    the last one meets the newest input."""

    weight: torch.Tensor
    dilation: int

    @property
    def state_shape(self) -> tuple[int, int]:
        """Inputs before the next token, oldest first."""
        channels, kernel = self.weight.shape
        return (kernel - 1) * self.dilation, channels

    def __call__(
        self, x: torch.Tensor, state: torch.Tensor, newest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` float32 [segments, tokens, channels] after `state` [segments, *state_shape]; returns the
        output, shaped like `x`, and the states after its `newest` last tokens, [segments, newest,
        *state_shape]."""
        num_tokens = x.shape[1]
        line = torch.cat((state, x), dim=1)
        out = line[:, :num_tokens] * self.weight[:, 0]
        for tap in range(1, self.weight.shape[1]):
            at = tap * self.dilation
            out = torch.addcmul(out, line[:, at : at + num_tokens], self.weight[:, tap])
        return out, newest_windows(line, state.shape[1], newest)


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """`table` [rows, size] is read at the rows that `ngrams` names, and `keys_value` makes of all of them one
    key a stream and one value."""

    layer: int
    ngrams: NgramHash
    table: torch.Tensor
    keys_value: Linear
    key_norm: StreamNorm
    query_norm: StreamNorm
    conv_norm: StreamNorm
    conv: DilatedConv

    @property
    def part(self) -> PointSpec:
        return PointSpec(CONV, self.layer, self.conv.state_shape)

    def __call__(self, streams: torch.Tensor, tokens: torch.Tensor, view: View) -> torch.Tensor:
        """What is added to `streams`, float32 [tokens, streams, width]. `tokens` are on the host."""
        rows = self.ngrams(tokens.numpy(), view.previous_tokens(self.ngrams.num_before))
        found = self.table[torch.from_numpy(rows).to(self.table.device)]
        shape = streams.shape
        both = self.keys_value(found.flatten(1)).float()
        keys, value = torch.split(both, [shape[1] * shape[2], shape[2]], dim=-1)
        agreed = (self.key_norm(keys.view(shape)) * self.query_norm(streams)).sum(-1) / math.sqrt(shape[2])
        gate = (agreed.abs().clamp_min(_LEAST).sqrt() * agreed.sign()).sigmoid()
        gated = gate[:, :, None] * value[:, None]
        return gated + F.silu(self._mixed(self.conv_norm(gated), view))

    def _mixed(self, x: torch.Tensor, view: View) -> torch.Tensor:
        num_segments, channels = len(view.segments), self.conv.weight.shape[0]
        rows = x.reshape(num_segments, -1, channels)
        out, states = self.conv(rows, view.point(CONV, self.layer), view.newest)
        view.set_point(CONV, self.layer, states)
        return out.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class PleSizes:
    """Of the whole embedding of a token, of the convolution, and of the table: its rows come to a multiple of
    `padded_to`, and the file has them in up to `num_shards` pieces."""

    embedding: int
    kernel: int
    dilation: int
    padded_to: int
    num_shards: int


def load_ple(
    weights: WeightSource,
    load: Loader,
    prefix: str,
    layer: int,
    ngrams: NgramHash,
    sizes: PleSizes,
    streams: StreamSizes,
) -> PerLayerEmbedding:
    """Raises WeightsRefused, for tensors that were hashed in another way too."""
    _check_hash(weights, f"{prefix}.ple_embedding", ngrams)
    channels = streams.num_streams * streams.width
    names = (f"{prefix}.key_proj", f"{prefix}.value_proj")
    conv = load.exact(f"{prefix}.conv1d.weight", channels, 1, sizes.kernel)[:, 0]
    num_rows = math.ceil(ngrams.num_rows / sizes.padded_to) * sizes.padded_to
    row_size = sizes.embedding // ngrams.sizes.size

    def norm(name: str) -> StreamNorm:
        return load_stream_norm(load, f"{prefix}.{name}", streams)

    return PerLayerEmbedding(
        layer=layer,
        ngrams=ngrams,
        table=_load_table(load, f"{prefix}.ple_embedding.ngram_embedding", num_rows, row_size, sizes),
        keys_value=load.linear(names, (channels, streams.width), sizes.embedding),
        key_norm=norm("norm_key"),
        query_norm=norm("norm_query"),
        conv_norm=norm("norm_conv"),
        conv=DilatedConv(conv, sizes.dilation),
    )


def _load_table(load: Loader, name: str, num_rows: int, row_size: int, sizes: PleSizes) -> torch.Tensor:
    """In one piece or in shards, all but the last of the same number of rows."""
    if load.has(f"{name}.weight"):
        return load.tensor(f"{name}.weight", num_rows, row_size)
    step = math.ceil(num_rows / sizes.num_shards)
    starts = range(0, num_rows, step)
    shards = (
        load.tensor(f"{name}.shard_{number}.weight", min(step, num_rows - start), row_size)
        for number, start in enumerate(starts)
    )
    first = next(shards)
    table = first.new_empty((num_rows, row_size))
    # One shard at a time: the table is most of such a model.
    table[: len(first)] = first
    for start, shard in zip(starts[1:], shards, strict=True):
        table[start : start + len(shard)] = shard
    return table


def _check_hash(weights: WeightSource, prefix: str, ngrams: NgramHash) -> None:
    """The file may say what its table was hashed with; it has to be what its configuration says."""
    ours = {
        "layer_multipliers": ngrams.multipliers,
        "ngram_heads_vocab_sizes": ngrams.sizes.reshape(-1),
        "ngram_heads_offsets": ngrams.offsets.reshape(-1),
    }
    for name, expected in ours.items():
        full = f"{prefix}.{name}"
        if weights.has(full) and not torch.equal(
            weights.tensor(full, torch.int64).cpu(), torch.from_numpy(expected)
        ):
            raise WeightsRefused(f"tensor {full} is not what the model's configuration makes of it")
