"""From a file's tensors to the layers of DeepSeek-V4."""

from __future__ import annotations

import torch

from engine.cache.dsv4 import (
    HEAVY_KEYS,
    HEAVY_RING,
    INDEX_KEYS,
    INDEX_RING,
    SPARSE_KEYS,
    SPARSE_RING,
    pooled,
    pooled_overlapping,
)
from engine.errors import WeightsRefused
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.deepseek_v4_config import HEAVY, SLIDING, SPARSE, DeepSeekV4Config
from engine.models.deepseek_v4_layers import (
    SCORING,
    Attention,
    ByScore,
    ByToken,
    Compressor,
    DeepSeekV4Block,
    Experts,
    Gated,
    Indexer,
)
from engine.models.hub_experts import inner_columns
from engine.models.hyper import HyperConnection, HyperHead
from engine.models.layers import RmsNorm
from engine.models.loading import Loader


class DeepSeekV4Loading:
    """From a file's tensors to the layers. In the file RoPE turns the last values of a head, two consecutive
    ones together; here it turns the first ones, half with half: rows and columns are put in that order.

    Names are those of the hub's checkpoint; transformers puts "model." before most of them.
    """

    def __init__(self, weights: WeightSource, placement: Placement, config: DeepSeekV4Config) -> None:
        self._load = Loader(weights, placement)
        self._config = config
        self._prefix = "model." if self._load.has("model.norm.weight") else ""

    # -- ends --------------------------------------------------------------------------------------

    def embedding(self) -> torch.Tensor:
        sizes = self._config.sizes
        return self._tensor(self._either("embed", "embed_tokens", ".weight"), sizes.vocab_size, sizes.width)

    def head(self, embedding: torch.Tensor) -> Linear:
        if self._config.tied:
            return Linear(embedding)
        return Linear(self._load.tensor("head.weight", *embedding.shape))

    def hyper_head(self) -> HyperHead:
        config, n = self._config, self._config.num_streams
        matrix, base, scale = (
            self._either("hc_head", "hc_head.hc", f"_{x}") for x in ("fn", "base", "scale")
        )
        return HyperHead(
            matrix=self._exact(matrix, n, n * config.sizes.width),
            base=self._exact(base, n),
            scale=self._exact(scale, 1),
            eps=config.hyper_eps,
            rms_eps=config.rms_eps,
        )

    def norm(self, name: str, size: int) -> RmsNorm:
        return RmsNorm(self._exact(f"{name}.weight", size), self._config.rms_eps)

    # -- a layer -----------------------------------------------------------------------------------

    def block(self, layer: int) -> DeepSeekV4Block:
        prefix, width = f"layers.{layer}", self._config.sizes.width
        return DeepSeekV4Block(
            kind=self._config.kinds[layer],
            attention_streams=self._streams(f"{prefix}.hc_attn"),
            attention_norm=self.norm(f"{prefix}.attn_norm", width),
            attention=self._attention(layer, f"{prefix}.attn"),
            ffn_streams=self._streams(f"{prefix}.hc_ffn"),
            ffn_norm=self.norm(f"{prefix}.ffn_norm", width),
            experts=self._experts(layer, f"{prefix}.ffn"),
        )

    def _streams(self, prefix: str) -> HyperConnection:
        config, n = self._config, self._config.num_streams
        return HyperConnection(
            matrix=self._exact(f"{prefix}_fn", (2 + n) * n, n * config.sizes.width),
            base=self._exact(f"{prefix}_base", (2 + n) * n),
            scale=self._exact(f"{prefix}_scale", 3),
            iterations=config.iterations,
            eps=config.hyper_eps,
            rms_eps=config.rms_eps,
        )

    def _attention(self, layer: int, prefix: str) -> Attention:
        config, sizes = self._config, self._config.sizes
        kind, size, width = config.kinds[layer], sizes.head_size, sizes.width
        inputs = [
            self._tensor(f"{prefix}.wq_a.weight", config.q_rank, width),
            self._ordered(self._tensor(f"{prefix}.wkv.weight", size, width), size),
        ]
        compressor = indexer = None
        if kind != SLIDING:
            names = (HEAVY_KEYS, HEAVY_RING) if kind == HEAVY else (SPARSE_KEYS, SPARSE_RING)
            compressor = self._compressor(layer, f"{prefix}.compressor", size, *names)
            inputs.append(self._lines(layer, f"{prefix}.compressor", size))
        if kind == SPARSE:
            indexer = self._indexer(layer, f"{prefix}.indexer")
            inputs.append(self._lines(layer, f"{prefix}.indexer.compressor", config.index_size))
            inputs.append(self._tensor(f"{prefix}.indexer.weights_proj.weight", config.index_heads, width))
        rows = [len(one) for one in inputs]
        group = sizes.num_heads // config.o_groups * size
        down = self._tensor(f"{prefix}.wo_a.weight", config.o_groups * config.o_rank, group)
        return Attention(
            layer=layer,
            inputs=Linear(torch.cat(inputs)),
            rows=rows + [0] * (5 - len(rows)),
            q_norm=self.norm(f"{prefix}.q_norm", config.q_rank),
            queries=self._queries(f"{prefix}.wq_b", sizes.num_heads, size),
            row_norm=self._row_norm(f"{prefix}.norm", size),
            sinks=self._exact(f"{prefix}.attn_sink", sizes.num_heads),
            out_down=self._ordered(down.T, size).T.reshape(config.o_groups, config.o_rank, group),
            out_up=Linear(self._tensor(f"{prefix}.wo_b.weight", width, config.o_groups * config.o_rank)),
            window=config.window,
            compressor=compressor,
            indexer=indexer,
        )

    def _indexer(self, layer: int, prefix: str) -> Indexer:
        config = self._config
        size = config.index_size
        return Indexer(
            compressor=self._compressor(layer, f"{prefix}.compressor", size, INDEX_KEYS, INDEX_RING),
            queries=self._queries(f"{prefix}.wq_b", config.index_heads, size),
            count=config.index_count,
        )

    def _compressor(self, layer: int, prefix: str, size: int, rows: str, ring: str) -> Compressor:
        kind = self._config.kinds[layer]
        compression = self._config.compressions[kind]
        bias = self._exact(f"{prefix}.ape", compression.ratio, compression.width(size))
        return Compressor(
            layer=layer,
            rows=rows,
            ring=ring,
            pool=pooled_overlapping if compression.overlapping else pooled,
            bias=self._ordered(bias.T, size).T.contiguous(),
            norm=self._row_norm(f"{prefix}.norm", size),
            rotary=self._config.rotaries[kind],
        )

    def _lines(self, layer: int, prefix: str, size: int) -> torch.Tensor:
        """The matrix that makes u and then z."""
        width = self._config.compressions[self._config.kinds[layer]].width(size)
        both = [
            self._tensor(f"{prefix}.{n}.weight", width, self._config.sizes.width) for n in ("wkv", "wgate")
        ]
        return self._ordered(torch.cat(both), size)

    def _queries(self, name: str, heads: int, size: int) -> Linear:
        return Linear(self._ordered(self._tensor(f"{name}.weight", heads * size, self._config.q_rank), size))

    def _row_norm(self, name: str, size: int) -> RmsNorm:
        return RmsNorm(self._ordered(self._exact(f"{name}.weight", size), size), self._config.rms_eps)

    def _ordered(self, rows: torch.Tensor, size: int) -> torch.Tensor:
        """`rows` [heads * size, ...] with what turns in front, in halves."""
        start = size - self._config.n_rot
        order = torch.cat(
            (torch.arange(start, size, 2), torch.arange(start + 1, size, 2), torch.arange(start))
        )
        heads = rows.reshape(-1, size, *rows.shape[1:])
        return heads[:, order.to(rows.device)].reshape(rows.shape)

    # -- experts -----------------------------------------------------------------------------------

    def _experts(self, layer: int, prefix: str) -> Experts:
        config, width = self._config, self._config.sizes.width
        experts = [f"{prefix}.experts.{number}" for number in range(config.num_experts)]
        parts = [inner_columns(self._load, self._gate_up(one), self._down(one)) for one in experts]
        shared = f"{prefix}.shared_experts"
        shared_gate_up, shared_down = inner_columns(self._load, self._gate_up(shared), self._down(shared))
        return Experts(
            router=Linear(self._exact(f"{prefix}.gate.weight", config.num_experts, width)),
            scoring=SCORING[config.scoring],
            choice=self._choice(layer, f"{prefix}.gate"),
            scale=config.expert_scale,
            gate_up=torch.stack([gate_up for gate_up, _ in parts]),
            down=torch.stack([down for _, down in parts]),
            shared_gate_up=Linear(shared_gate_up),
            shared_down=Linear(shared_down),
            gated=Gated(config.limit),
            ranks=self._load.ranks,
        )

    def _choice(self, layer: int, prefix: str) -> ByScore | ByToken:
        config = self._config
        if not config.hashed[layer]:
            return ByScore(self._exact(f"{prefix}.bias", config.num_experts), config.num_chosen)
        name = f"{prefix}.tid2eid"
        table = self._exact(name, config.sizes.vocab_size, config.num_chosen).long()
        if not 0 <= int(table.min()) <= int(table.max()) < config.num_experts:
            raise WeightsRefused(f"tensor {name} names an expert that there is not")
        return ByToken(table)

    def _gate_up(self, prefix: str) -> torch.Tensor:
        inner, width = self._config.expert_inner, self._config.sizes.width
        return torch.cat([self._tensor(f"{prefix}.{name}.weight", inner, width) for name in ("w1", "w3")])

    def _down(self, prefix: str) -> torch.Tensor:
        return self._tensor(f"{prefix}.w2.weight", self._config.sizes.width, self._config.expert_inner)

    # -- tensors -----------------------------------------------------------------------------------

    def _either(self, hub: str, library: str, end: str) -> str:
        """transformers writes either of its own name and the hub's, as its version and class have it."""
        return library + end if self._load.has(self._prefix + library + end) else hub + end

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._load.tensor(self._prefix + name, *shape)

    def _exact(self, name: str, *shape: int) -> torch.Tensor:
        return self._load.exact(self._prefix + name, *shape)
