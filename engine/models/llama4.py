"""Llama 4, its text model: layers with RoPE whose attention begins anew at every chunk, layers without
positions that see everything, and experts that are fed their share of the input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cache.memory import WindowSpec
from engine.linear import Linear
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Decoder, Ends, Pass, grouped_needs
from engine.models.fields import Fields
from engine.models.hub_experts import divided_experts
from engine.models.hub_rope import read_rope
from engine.models.layers import FeedForward, Projection, RmsNorm
from engine.models.loading import Loader, check_bias, hub_ffn, hub_head, hub_out, hub_prefix, hub_qkv, local
from engine.models.moe import Experts
from engine.models.sizes import CHUNKED, FULL, Sizes, read_layer_types, read_sizes
from engine.rope import turn


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries far from the start score sharper: by 1 + `strength` * log(1 + floor((position + 1) / `every`))
    (Nakanishi 2025, "Scalable-Softmax is superior for attention")."""

    every: int
    strength: float

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, 1, 1]."""
        steps = torch.floor((positions.float() + 1) / self.every)
        return (torch.log1p(steps) * self.strength + 1)[:, None, None]


@dataclass(frozen=True, slots=True)
class Llama4Attention:
    """Grouped-query attention. `rope` names the rotary, if there is one; `eps` is that of the norm without
    weights that turned heads of q and k go through, if they do."""

    layer: int
    qkv: Linear
    out: Projection
    sizes: Sizes
    rope: str | None
    eps: float | None
    temperature: Temperature | None

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        """`x` [tokens, width] in the model's dtype; the same shape comes back."""
        heads, kv_heads, size = self.sizes.num_heads, self.sizes.num_kv_heads, self.sizes.head_size
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, size)
        qk, v = qkv[:, : heads + kv_heads].float(), qkv[:, heads + kv_heads :]
        if self.rope is not None:
            qk = turn(qk, step.angles[self.rope])
        if self.eps is not None:
            qk = F.rms_norm(qk, (size,), None, self.eps)
        q, k = qk[:, :heads], qk[:, heads:]
        if self.temperature is not None:
            q = q * self.temperature.of(step.positions)
        attended = step.view.attend(self.layer, q.to(x.dtype), k.to(x.dtype), v, size**-0.5)
        return self.out(attended.reshape(x.shape[0], -1))


@dataclass(frozen=True, slots=True)
class SharedAndRouted:
    """One expert for every token, and `num_chosen` that take the token times the sigmoid of its score."""

    router: Linear
    shared: FeedForward
    experts: Experts
    num_chosen: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).float().topk(self.num_chosen)
        fed = x[:, None] * scores.sigmoid().to(x.dtype)[:, :, None]
        each = self.experts(fed.flatten(0, 1), chosen.reshape(-1, 1), torch.ones_like(scores).reshape(-1, 1))
        return self.shared(x) + each.view(*chosen.shape, -1).sum(1)


@dataclass(frozen=True, slots=True)
class Llama4Block:
    attention_norm: RmsNorm
    attention: Llama4Attention
    ffn_norm: RmsNorm
    ffn: FeedForward | SharedAndRouted

    def __call__(self, x: torch.Tensor, step: Pass) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x).to(step.dtype), step)
        return x + self.ffn(self.ffn_norm(x).to(step.dtype))


class Llama4(Decoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields, load = Fields(weights), Loader(weights, placement)
        sizes = read_sizes(fields)
        fields.word("hidden_act", ("silu",), "silu")
        turned = _turned_layers(fields, sizes.num_layers)
        kinds = read_layer_types(fields, (CHUNKED, FULL), tuple(CHUNKED if rope else FULL for rope in turned))
        windows: dict[str, WindowSpec | None] = {FULL: None}
        if CHUNKED in kinds:
            windows[CHUNKED] = WindowSpec(fields.count("attention_chunk_size"), chunked=True)
        rotary = read_rope(fields, sizes.head_size, placement.n_ctx, default_base=500_000.0)
        if rotary.magnitude != 1.0:
            # The norm behind it would undo the magnitude, and a shifted row could not be told from it.
            raise fields.refused("rope_parameters", "RoPE that changes how long heads are")
        prefix = hub_prefix(load)
        embedding = load.tensor(f"{prefix}.embed_tokens.weight", sizes.vocab_size, sizes.width)
        read = _Reader(fields, load, sizes, prefix)
        super().__init__(
            weights.architecture,
            fields,
            sizes,
            placement,
            needs=grouped_needs(
                sizes,
                [(rotary if rope else None, windows[kind]) for rope, kind in zip(turned, kinds, strict=True)],
            ),
            rotaries={ROPE: rotary},
            ends=Ends(
                embedding,
                load.norm(f"{prefix}.norm", sizes.width, read.eps),
                hub_head(load, fields, sizes, embedding, tied=False),
            ),
            blocks=[read.block(layer, rope) for layer, rope in enumerate(turned)],
        )


ROPE = "rope"


def _turned_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers have RoPE. The field's name says the opposite of what its ones mean."""
    given = fields.counts("no_rope_layers", most=1) if fields.has("no_rope_layers") else ()
    if not given:
        every = fields.count("no_rope_layer_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if len(given) < num_layers:
        raise fields.refused("no_rope_layers", list(given))
    return tuple(value == 1 for value in given[:num_layers])


def _routed_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    if fields.has("moe_layers"):
        return frozenset(fields.counts("moe_layers", most=num_layers - 1))
    step = fields.count("interleave_moe_layer_step", 1)
    return frozenset(range(step - 1, num_layers, step))


class _Reader:
    """Blocks of one model."""

    def __init__(self, fields: Fields, load: Loader, sizes: Sizes, prefix: str) -> None:
        self._fields = fields
        self._load = load
        self._sizes = sizes
        self._prefix = prefix
        self._routed = _routed_layers(fields, sizes.num_layers)
        self.eps = fields.positive("rms_norm_eps", 1e-5)
        self._head_eps = self.eps if fields.flag("use_qk_norm", True) else None
        self._temperature: Temperature | None = None
        if fields.flag_or_count("attn_temperature_tuning", True):
            every, strength = fields.count("floor_scale", 8192), fields.number("attn_scale", 0.1)
            self._temperature = Temperature(every, strength)

    def block(self, layer: int, rope: bool) -> Llama4Block:
        load, width, prefix = self._load, self._sizes.width, f"{self._prefix}.layers.{layer}"
        return Llama4Block(
            attention_norm=load.norm(f"{prefix}.input_layernorm", width, self.eps),
            attention=self._attention(layer, f"{prefix}.self_attn", rope),
            ffn_norm=load.norm(f"{prefix}.post_attention_layernorm", width, self.eps),
            ffn=self._mixture(f"{prefix}.feed_forward")
            if layer in self._routed
            else self._ffn(f"{prefix}.feed_forward", "intermediate_size_mlp"),
        )

    def _attention(self, layer: int, prefix: str, rope: bool) -> Llama4Attention:
        sizes = self._sizes
        check_bias(self._load, self._fields, f"{prefix}.q_proj", False)
        return Llama4Attention(
            layer=layer,
            qkv=hub_qkv(self._load, prefix, sizes, pairs=sizes.head_size // 2),
            out=hub_out(self._load, f"{prefix}.o_proj", sizes),
            sizes=local(self._load, sizes),
            rope=ROPE if rope else None,
            eps=self._head_eps if rope else None,
            temperature=None if rope else self._temperature,
        )

    def _ffn(self, prefix: str, inner: str) -> FeedForward:
        return hub_ffn(self._load, prefix, self._sizes.width, self._fields.count(inner), F.silu)

    def _mixture(self, prefix: str) -> SharedAndRouted:
        load, width, inner = self._load, self._sizes.width, self._fields.count("intermediate_size")
        num_experts = self._fields.count("num_local_experts")
        gate_up = load.tensor(f"{prefix}.experts.gate_up_proj", num_experts, width, 2 * inner)
        down = load.tensor(f"{prefix}.experts.down_proj", num_experts, inner, width)
        return SharedAndRouted(
            router=load.linear((f"{prefix}.router",), (num_experts,), width),
            shared=self._ffn(f"{prefix}.shared_expert", "intermediate_size"),
            # The file has matrices as [inputs, outputs].
            experts=divided_experts(load, gate_up.mT, down.mT, F.silu),
            num_chosen=self._fields.count("num_experts_per_tok", 1, most=num_experts),
        )
