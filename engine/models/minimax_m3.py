"""MiniMax-M3: grouped-query attention over chosen blocks of tokens (`engine.cache.msa`), experts with clamped
gates. The first layers are dense: they have no indexer, and no experts."""

from __future__ import annotations

import torch

from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder, Ends
from engine.models.fields import Fields
from engine.models.hub_experts import inner_columns
from engine.models.layers import HeadNorm, RmsNorm
from engine.models.loading import Loader, hub_out, local, tied_head
from engine.models.minimax_m3_config import ExpertSizes, MiniMaxM3Config, needs_of, read_config
from engine.models.minimax_m3_layers import (
    ALL,
    BlockAttention,
    Dense,
    Gate,
    Indexer,
    MiniMaxM3Block,
    Routed,
)
from engine.parallel.share import values_of


class MiniMaxM3(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields = Fields(weights)
        config = read_config(fields, placement.n_ctx)
        load = _Loading(weights, placement, config)
        super().__init__(
            weights.architecture,
            fields,
            config.sizes,
            placement,
            needs=needs_of(config),
            rotaries={ALL: config.rotary},
            ends=load.ends(),
            blocks=[load.block(layer) for layer in range(config.sizes.num_layers)],
        )


class _Loading:
    """From a file's tensors to the layers. Each tensor has the name that transformers gives it, or that of
    the hub's checkpoint."""

    def __init__(self, weights: WeightSource, placement: Placement, config: MiniMaxM3Config) -> None:
        self._load = Loader(weights, placement)
        self._config = config
        self._dtype = placement.dtype
        self._gate = Gate(config.alpha, config.limit)
        prefixes = ("model.", "language_model.model.", "model.language_model.")
        inside = [one for one in prefixes if self._load.has(f"{one}embed_tokens.weight")]
        self._prefix = inside[0] if inside else prefixes[0]

    def ends(self) -> Ends:
        sizes = self._config.sizes
        embedding = self._tensor((sizes.vocab_size, sizes.width), "embed_tokens.weight")
        head = embedding
        if not self._config.tied:
            name = "language_model.lm_head.weight"
            name = name if self._load.has(name) else "lm_head.weight"
            head = self._load.tensor(name, sizes.vocab_size, sizes.width)
        return Ends(embedding, self._norm("norm"), tied_head(self._load, head))

    def block(self, layer: int) -> MiniMaxM3Block:
        prefix = f"layers.{layer}"
        return MiniMaxM3Block(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            attention=self._attention(layer, f"{prefix}.self_attn"),
            ffn_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            ffn=self._ffn(layer, prefix),
        )

    # -- attention ---------------------------------------------------------------------------------

    def _attention(self, layer: int, prefix: str) -> BlockAttention:
        sizes = self._config.sizes
        heads, groups, size = sizes.num_heads, sizes.num_kv_heads, sizes.head_size
        rows = {"q": heads * size, "k": groups * size, "v": groups * size}
        share, mine = self._load.share.heads(heads, groups), local(self._load, sizes)
        inputs = [
            self._tensor((n, sizes.width), f"{prefix}.{name}_proj.weight")[keep]
            for (name, n), keep in zip(rows.items(), share.each(size, size), strict=True)
        ]
        indexer, sizes_of = None, self._config.indexer
        if self._config.sparse[layer] and sizes_of is not None:
            q = self._tensor((groups * sizes_of.size, sizes.width), *_index_names(prefix, "q_proj"))
            inputs.append(q[values_of(share.kv, sizes_of.size)])
            inputs.append(self._tensor((sizes_of.size, sizes.width), *_index_names(prefix, "k_proj")))
            counts = (mine.num_kv_heads, 1)
            norm = self._head_norm(sizes_of.size, counts, *(_index_names(prefix, n) for n in _NORMS))
            indexer = Indexer(norm, sizes_of.law)
        return BlockAttention(
            layer=layer,
            inputs=Linear(torch.cat(inputs)),
            out=hub_out(self._load, self._prefix + f"{prefix}.o_proj", sizes),
            sizes=mine,
            norm=self._head_norm(
                size, (mine.num_heads, mine.num_kv_heads), *((f"{prefix}.{n}.weight",) for n in _NORMS)
            ),
            indexer=indexer,
        )

    def _head_norm(self, size: int, counts: tuple[int, int], *names: tuple[str, ...]) -> HeadNorm:
        """Over `counts` heads of q and of k, whose weights go by any of two `names`."""
        weights = [self._factor(size, *some).expand(n, -1) for n, some in zip(counts, names, strict=True)]
        return HeadNorm(torch.cat(weights), self._config.rms_eps)

    # -- feed-forward ------------------------------------------------------------------------------

    def _ffn(self, layer: int, prefix: str) -> Dense | Routed:
        experts = self._config.experts
        if not self._config.routed[layer] or experts is None:
            return self._dense((f"{prefix}.mlp",), self._config.dense_inner)
        width, count = self._config.sizes.width, experts.count
        theirs, ours = f"{prefix}.block_sparse_moe", f"{prefix}.mlp"
        router = self._name(f"{ours}.gate.weight", f"{theirs}.gate.weight")
        bias = self._name(f"{ours}.gate.e_score_correction_bias", f"{theirs}.e_score_correction_bias")
        gate_up, down = inner_columns(
            self._load,
            self._experts(ours, theirs, "gate_up_proj", ("w1", "w3"), experts),
            self._experts(ours, theirs, "down_proj", ("w2",), experts),
        )
        return Routed(
            router=Linear(self._load.exact(router, count, width)),
            bias=self._load.exact(bias, count),
            gate_up=gate_up,
            down=down,
            gate=self._gate,
            shared=self._dense((f"{ours}.shared_experts", f"{theirs}.shared_experts"), experts.shared_inner),
            num_chosen=experts.num_chosen,
            scale=experts.scale,
            ranks=self._load.ranks,
        )

    def _experts(
        self, ours: str, theirs: str, name: str, parts: tuple[str, ...], experts: ExpertSizes
    ) -> torch.Tensor:
        """[experts, rows, columns]: one tensor, or `parts` of every expert."""
        width, inner = self._config.sizes.width, experts.inner
        rows, columns = (width, inner) if name == "down_proj" else (2 * inner, width)
        joined = self._name(f"{ours}.experts.{name}")
        if self._load.has(joined):
            return self._load.tensor(joined, experts.count, rows, columns)
        shape = (rows // len(parts), columns)
        return torch.stack(
            [
                torch.cat([self._tensor(shape, f"{theirs}.experts.{number}.{one}.weight") for one in parts])
                for number in range(experts.count)
            ]
        )

    def _dense(self, prefixes: tuple[str, ...], inner: int) -> Dense:
        width = self._config.sizes.width
        both = [f"{prefix}.gate_up_proj.weight" for prefix in prefixes]
        if self._load.has(self._name(*both)):
            gate_up = self._tensor((2 * inner, width), *both)
        else:
            names = [[f"{prefix}.{part}_proj.weight" for prefix in prefixes] for part in ("gate", "up")]
            gate_up = torch.cat([self._tensor((inner, width), *some) for some in names])
        down = self._tensor((width, inner), *(f"{prefix}.down_proj.weight" for prefix in prefixes))
        gate_up, down = inner_columns(self._load, gate_up, down)
        return Dense(Linear(gate_up), self._load.adding(down), self._gate, self._dtype)

    # -- tensors -----------------------------------------------------------------------------------

    def _name(self, *names: str) -> str:
        """The first of `names` that the decoder has, or else the first."""
        full = [self._prefix + name for name in names]
        return next((name for name in full if self._load.has(name)), full[0])

    def _tensor(self, shape: tuple[int, ...], *names: str) -> torch.Tensor:
        return self._load.tensor(self._name(*names), *shape)

    def _factor(self, size: int, *names: str) -> torch.Tensor:
        """A norm's factor: a file has it minus 1."""
        return self._load.exact(self._name(*names), size) + 1

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._factor(self._config.sizes.width, f"{name}.weight"), self._config.rms_eps)


_NORMS = ("q_norm", "k_norm")


def _index_names(prefix: str, name: str) -> tuple[str, str]:
    """What a tensor of an indexer may be called."""
    return f"{prefix}.indexer.{name}.weight", f"{prefix}.index_{name}.weight"
