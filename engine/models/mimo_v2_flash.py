"""MiMo-V2-Flash: most layers have a window, sinks and twice the key heads of those that see everything;
keys are wider than values, and most layers route to experts (Xiaomi, MiMo-V2-Flash technical report)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, PartNeed, WindowSpec, keys_and_values
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.blocks import Ffn, SerialBlock
from engine.models.decoder import Decoder, Ends
from engine.models.fields import Fields
from engine.models.hub_experts import hub_experts
from engine.models.hub_rope import read_rope
from engine.models.layers import Attention
from engine.models.loading import Loader, check_bias, hub_ffn, hub_head
from engine.models.mla_ffn import DENSE, MAX_EXPERTS, SPARSE, read_groups, read_num_chosen
from engine.models.moe import Experts
from engine.models.routing import BiasedSigmoid
from engine.models.sizes import FULL, SLIDING, Sizes, read_layer_types, read_sizes
from engine.parallel.share import values_of

#: bases and the share of a head that turns, where a file says nothing
_BASES = {FULL: 5_000_000.0, SLIDING: 10_000.0}
_SHARE = 0.334


@dataclass(frozen=True, slots=True)
class Routed:
    """Experts alone, none that all tokens share. `router` is float32."""

    router: Linear
    law: BiasedSigmoid
    experts: Experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.law(self.router(x.float())))


class MimoV2Flash(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.word("hidden_act", ("silu",), "silu")
        _check_windowed_layers(fields, sizes)
        kinds = _layer_types(fields, sizes.num_layers)
        rotaries = {
            kind: read_rope(fields, sizes.head_size, placement.n_ctx, kind, base, _SHARE, field)
            for (kind, base), field in zip(_BASES.items(), ("rope_theta", "swa_rope_theta"), strict=True)
        }
        embedding = load.tensor("model.embed_tokens.weight", sizes.vocab_size, sizes.width)
        read = _Reader(fields, load, sizes)
        windows = {FULL: None, SLIDING: _window(fields)}
        parts: list[PartNeed] = []
        for layer, kind in enumerate(kinds):
            heads = read.num_kv_heads(kind)
            parts += keys_and_values(
                layer, heads, sizes.head_size, read.head_size_v, rotaries[kind], windows[kind]
            )
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=MemoryNeeds("iswa" if SLIDING in kinds else "kv", tuple(parts)),
            rotaries=rotaries,
            ends=Ends(
                embedding,
                load.norm("model.norm", sizes.width, read.eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=[read.block(layer, kind) for layer, kind in enumerate(kinds)],
        )


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The first layer and then every sixth see everything, unless the file says otherwise."""
    default = tuple(FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING for layer in range(num_layers))
    if fields.has("hybrid_layer_pattern"):
        default = _by_number(fields, "hybrid_layer_pattern", num_layers, (FULL, SLIDING))
    return read_layer_types(fields, (SLIDING, FULL), default)


def _by_number(fields: Fields, name: str, num_layers: int, kinds: tuple[str, str]) -> tuple[str, ...]:
    """The hub's own files number the two kinds of layers."""
    numbers = fields.counts(name, most=1)
    if len(numbers) != num_layers:
        raise fields.refused(name, list(numbers))
    return tuple(kinds[number] for number in numbers)


def _check_windowed_layers(fields: Fields, sizes: Sizes) -> None:
    """The hub's own files could have heads, and sinks, of any kind in both kinds of layers."""
    fields.only("swa_num_attention_heads", sizes.num_heads, sizes.num_heads)
    fields.only("swa_head_dim", sizes.head_size, sizes.head_size)
    size_v = fields.count("v_head_dim")
    fields.only("swa_v_head_dim", size_v, size_v)
    fields.only("add_swa_attention_sink_bias", True, True)
    fields.only("add_full_attention_sink_bias", False, False)
    fields.only("n_shared_experts", None)


def _window(fields: Fields) -> WindowSpec:
    """Older files count the tokens before the query alone."""
    if fields.has("sliding_window_size"):
        return WindowSpec(fields.count("sliding_window_size") + 1)
    return WindowSpec(fields.count("sliding_window"))


class _Reader:
    """Blocks of one model."""

    def __init__(self, fields: Fields, load: Loader, sizes: Sizes) -> None:
        self._fields = fields
        self._load = load
        self._sizes = sizes
        self.eps = fields.positive("rms_norm_eps", fields.positive("layernorm_epsilon", 1e-5))
        self.head_size_v = fields.count("v_head_dim")
        self._value_scale = fields.positive_or_null("attention_value_scale") or 1.0
        self._ffn_kinds = _ffn_kinds(fields, sizes.num_layers)

    def num_kv_heads(self, kind: str) -> int:
        """Layers with windows have twice as many, unless the file says how many."""
        if kind == FULL:
            return self._sizes.num_kv_heads
        count = self._fields.count("swa_num_key_value_heads", 2 * self._sizes.num_kv_heads)
        if self._sizes.num_heads % count:
            raise self._fields.refused("swa_num_key_value_heads", count)
        return count

    def block(self, layer: int, kind: str) -> SerialBlock:
        load, width, prefix = self._load, self._sizes.width, f"model.layers.{layer}"
        return SerialBlock(
            kind=kind,
            attention_norm=load.norm(f"{prefix}.input_layernorm", width, self.eps),
            attention=self._attention(layer, f"{prefix}.self_attn", kind),
            ffn_norm=load.norm(f"{prefix}.post_attention_layernorm", width, self.eps),
            ffn=self._ffn(f"{prefix}.mlp", self._ffn_kinds[layer]),
        )

    def _attention(self, layer: int, prefix: str, kind: str) -> Attention:
        load, sizes, size_v = self._load, self._sizes, self.head_size_v
        kv_heads = self.num_kv_heads(kind)
        check_bias(load, self._fields, f"{prefix}.q_proj", False)
        rows = (sizes.num_heads * sizes.head_size, kv_heads * sizes.head_size, kv_heads * size_v)
        names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        mine = load.share.heads(sizes.num_heads, kv_heads)
        columns, sinks = values_of(mine.q, size_v), None
        if kind == SLIDING:
            sinks = load.exact(f"{prefix}.attention_sink_bias", sizes.num_heads)[values_of(mine.q, 1)]
        return Attention(
            layer=layer,
            qkv=load.linear(names, rows, sizes.width, mine.joined(sizes.head_size, size_v)),
            out=load.summed(f"{prefix}.o_proj", sizes.width, sizes.num_heads * size_v, columns),
            num_heads=len(mine.q),
            num_kv_heads=len(mine.kv),
            head_size=sizes.head_size,
            head_size_v=size_v,
            scale=sizes.head_size**-0.5,
            norm=None,
            sinks=sinks,
            value_scale=self._value_scale,
        )

    def _ffn(self, prefix: str, kind: str) -> Ffn:
        load, fields, width = self._load, self._fields, self._sizes.width
        if kind == DENSE:
            return hub_ffn(load, prefix, width, fields.count("intermediate_size"), F.silu)
        count = fields.count("n_routed_experts", most=MAX_EXPERTS)
        inner = fields.count("moe_intermediate_size")
        return Routed(
            router=Linear(load.exact(f"{prefix}.gate.weight", count, width)),
            law=_law(load, fields, prefix, count),
            experts=hub_experts(load, f"{prefix}.experts", count, inner, width, F.silu),
        )


def _ffn_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """All but the first layer have experts, unless the file says otherwise."""
    if fields.has("mlp_layer_types"):
        return fields.words("mlp_layer_types", num_layers, (DENSE, SPARSE))
    if fields.has("moe_layer_freq"):
        return _by_number(fields, "moe_layer_freq", num_layers, (DENSE, SPARSE))
    return (DENSE, *(SPARSE for _ in range(num_layers - 1)))


def _law(load: Loader, fields: Fields, prefix: str, num_experts: int) -> BiasedSigmoid:
    """DeepSeek-V3's; files with a scale of 1 leave it out."""
    fields.only("scoring_func", "sigmoid", "sigmoid")
    fields.only("topk_method", "noaux_tc", "noaux_tc")
    groups = read_groups(fields, num_experts, scored=2)
    return BiasedSigmoid(
        bias=load.exact(f"{prefix}.gate.e_score_correction_bias", num_experts),
        groups=groups,
        num_chosen=read_num_chosen(fields, num_experts, groups),
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
