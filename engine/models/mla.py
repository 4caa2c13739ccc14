"""Multi-head latent attention (DeepSeek-V2, section 2.1): of every token one row is kept for all heads, a
latent that keys and values are made of, and a key of its own that RoPE turns.

It is computed in the absorbed form: each head's key matrix goes to the query and its value matrix to the
output, so that attention reads the latents themselves, as keys of all heads and as their values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.cache.memory import KEYS, Chosen, RowsSpec, Turned, View, WindowSpec
from engine.errors import WeightsRefused
from engine.linear import Linear
from engine.models.fields import Fields
from engine.models.hub_rope import read_rope, rope_section, rope_type, yarn_magnitude
from engine.models.layers import Projection, RmsNorm
from engine.models.loading import Loader, halves_of_pairs, own
from engine.parallel.share import values_of
from engine.rope import Angles, Rotary, turn


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Counts, and sizes in values. `q_rank` is that of the queries' own latent, None where there is none; of
    a head's q and k `nope` values stay as they are, and `rope` behind them turn, of keys all heads' same."""

    width: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    pairs: bool = True  # whether the file's RoPE is of consecutive values

    @property
    def head(self) -> int:
        return self.nope + self.rope

    @property
    def row(self) -> int:
        return self.kv_rank + self.rope


def read_latent_sizes(fields: Fields, width: int, num_heads: int) -> LatentSizes:
    """Raises WeightsRefused."""
    if fields.count("num_key_value_heads", num_heads) != num_heads:
        raise fields.refused("num_key_value_heads", fields.count("num_key_value_heads"))
    rope = fields.count("qk_rope_head_dim")
    if rope % 2:
        raise fields.refused("qk_rope_head_dim", rope)
    return LatentSizes(
        width=width,
        num_heads=num_heads,
        q_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=fields.count("kv_lora_rank"),
        nope=fields.count("qk_nope_head_dim"),
        rope=rope,
        value=fields.count("v_head_dim"),
    )


def read_latent_rope(
    fields: Fields, sizes: LatentSizes, n_ctx: int, default_base: float = 10_000.0
) -> tuple[Rotary, float]:
    """What turns, and the scale of scores: 1/sqrt(head), and where RoPE is stretched and the file says
    mscale_all_dim times the square of YaRN's magnitude. Then all values of q and k are longer, not only those
    that turn. Raises WeightsRefused."""
    rope, scale = rope_section(fields, None), float(sizes.head**-0.5)
    stretched = rope_type(rope, ("default", "linear", "yarn")) != "default"
    by = rope.number("mscale_all_dim", 0.0)
    if stretched and by:
        scale *= yarn_magnitude(rope.number("factor"), by) ** 2
    rotary = read_rope(fields, sizes.rope, n_ctx, default_base=default_base)
    if rotary.n_rot != sizes.rope:
        raise rope.refused("partial_rotary_factor", rotary.n_rot / sizes.rope)
    return rotary, scale


def latent_rows(layer: int, sizes: LatentSizes, rotary: Rotary, window: WindowSpec | None = None) -> RowsSpec:
    """The part of one layer: rows [latent, turned key]."""
    turned = Turned(rotary, sizes.kv_rank)
    return RowsSpec(KEYS, layer, 1, sizes.row, turned=turned, window=window, value_size=sizes.kv_rank)


@dataclass(frozen=True, slots=True)
class Lowered:
    """What the tokens of a pass become first: `latent` [tokens, q_rank] for queries (their heads themselves
    where there is no q_rank), and `row` [tokens, 1, kv_rank + rope] to be kept."""

    latent: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer. `down` gives the queries' latent, the latent of the row and its key, in this order;
    `k_up` is [heads, nope, kv_rank] and `v_up` [heads, kv_rank, value]. `k_norm` is over the key before it
    turns; the sigmoid of `gate` [heads] scales what each head gives."""

    layer: int
    sizes: LatentSizes
    scale: float
    down: Linear
    q_norm: RmsNorm | None
    q_up: Linear | None
    kv_norm: RmsNorm
    k_norm: RmsNorm | None
    k_up: torch.Tensor
    v_up: torch.Tensor
    gate: Linear | None
    out: Projection

    def lower(self, x: torch.Tensor, angles: Angles | None) -> Lowered:
        """`x` [tokens, width] in the model's dtype. No angles: no positions."""
        lowered = self.down(x)
        sizes = self.sizes
        rest = lowered.shape[-1] - sizes.row
        latent, kv, k = torch.split(lowered, [rest, sizes.kv_rank, sizes.rope], dim=-1)
        if self.q_norm is not None:
            latent = self.q_norm(latent.float()).to(x.dtype)
        k = k.float() if self.k_norm is None else self.k_norm(k.float())
        row = torch.cat((self.kv_norm(kv.float())[:, None], _turned(k[:, None], angles)), -1)
        return Lowered(latent, row.to(x.dtype))

    def __call__(
        self,
        x: torch.Tensor,
        lowered: Lowered,
        angles: Angles | None,
        view: View,
        chosen: Chosen | None = None,
    ) -> torch.Tensor:
        """What `lower` made of `x`, to [tokens, width]. `chosen` is that of `View.attend`."""
        sizes, num_tokens = self.sizes, x.shape[0]
        q = lowered.latent if self.q_up is None else self.q_up(lowered.latent)
        q_nope, q_rope = torch.split(
            q.view(num_tokens, sizes.num_heads, sizes.head), [sizes.nope, sizes.rope], dim=-1
        )
        absorbed = torch.bmm(q_nope.transpose(0, 1), self.k_up).transpose(0, 1)
        query = torch.cat((absorbed, _turned(q_rope, angles)), -1)
        latents = view.attend(self.layer, query, lowered.row, None, self.scale, chosen=chosen)
        heads = torch.bmm(latents.transpose(0, 1), self.v_up).transpose(0, 1)
        if self.gate is not None:
            heads = heads * self.gate(x).sigmoid()[:, :, None]
        return self.out(heads.reshape(num_tokens, -1))


def _turned(x: torch.Tensor, angles: Angles | None) -> torch.Tensor:
    return x if angles is None else turn(x, angles)


@dataclass(frozen=True, slots=True)
class Gains:
    """What a family multiplies its latents by, behind their norms; 1 in most."""

    q: float = 1.0
    kv: float = 1.0


def stretching(sizes: LatentSizes) -> Gains:
    """sqrt(width / rank), as if latents were as long as the residual stream."""
    q = 1.0 if sizes.q_rank is None else (sizes.width / sizes.q_rank) ** 0.5
    return Gains(float(q), float((sizes.width / sizes.kv_rank) ** 0.5))


def load_latent_attention(
    load: Loader,
    prefix: str,
    layer: int,
    sizes: LatentSizes,
    scale: float,
    eps: float = 1e-6,
    gains: Gains = Gains(),
) -> LatentAttention:
    """The tensors of `prefix` under the hub's names; `eps` is that of the latents' norms. The norm of
    keys, the gate, and biases of the matrices that read x and of the last are where the file has them.

    Ranks share the heads, and each has all of the latents: a rank has the rows that all the heads read.
    """
    mine = load.share.of(sizes.num_heads)
    if load.has(f"{prefix}.o_proj.bias") != load.has(f"{prefix}.kv_a_proj_with_mqa.bias"):
        raise WeightsRefused(f"the model has a bias of one of {prefix}.o_proj and kv_a_proj_with_mqa alone")
    norm_q, up_q = None, None
    q_name = f"{prefix}.q_proj"
    if sizes.q_rank is not None:
        q_name = f"{prefix}.q_a_proj"
        norm_q = _norm(load, f"{prefix}.q_a_layernorm", sizes.q_rank, eps, gains.q)
        q_rows = load.tensor(f"{prefix}.q_b_proj.weight", *_q_shape(sizes))
        up_q = Linear(_q_in_halves(own(q_rows[values_of(mine, sizes.head)]), sizes))
    k_up, v_up = _key_and_value(load, prefix, sizes, mine)
    norm_k = gate = None
    if load.has(f"{prefix}.k_rope_only_layernorm.weight"):
        weight = load.exact(f"{prefix}.k_rope_only_layernorm.weight", sizes.rope)
        norm_k = RmsNorm(_row_in_halves(weight, sizes, 0), eps)
    if load.has(f"{prefix}.g_proj.weight"):
        gate = load.linear((f"{prefix}.g_proj",), (sizes.num_heads,), sizes.width, (values_of(mine, 1),))
    return LatentAttention(
        layer=layer,
        sizes=replace(sizes, num_heads=len(mine)),
        scale=scale,
        down=_down(load, q_name, f"{prefix}.kv_a_proj_with_mqa", sizes, mine),
        q_norm=norm_q,
        q_up=up_q,
        kv_norm=_norm(load, f"{prefix}.kv_a_layernorm", sizes.kv_rank, eps, gains.kv),
        k_norm=norm_k,
        k_up=k_up,
        v_up=v_up,
        gate=gate,
        out=load.summed(
            f"{prefix}.o_proj", sizes.width, sizes.num_heads * sizes.value, values_of(mine, sizes.value)
        ),
    )


def _norm(load: Loader, name: str, size: int, eps: float, gain: float) -> RmsNorm:
    norm = load.norm(name, size, eps)
    return norm if gain == 1.0 else RmsNorm(norm.weight * gain, eps)


def _q_shape(sizes: LatentSizes) -> tuple[int, int]:
    return sizes.num_heads * sizes.head, sizes.width if sizes.q_rank is None else sizes.q_rank


def _down(load: Loader, q_name: str, kv_name: str, sizes: LatentSizes, mine: range) -> Linear:
    """The matrices that read x, as one; of heads that come straight from x those that are `mine`."""
    q_rows = sizes.num_heads * sizes.head if sizes.q_rank is None else sizes.q_rank
    q = load.tensor(f"{q_name}.weight", q_rows, sizes.width)
    if sizes.q_rank is None:
        q = _q_in_halves(q[values_of(mine, sizes.head)], sizes)
    kv = load.tensor(f"{kv_name}.weight", sizes.row, sizes.width)
    weight = torch.cat((q, _row_in_halves(kv, sizes, sizes.kv_rank)))
    if not load.has(f"{kv_name}.bias"):
        return Linear(weight)
    # Heads that come straight from x have no bias, though the row has one.
    q_bias = q.new_zeros(len(q)) if sizes.q_rank is None else load.tensor(f"{q_name}.bias", q_rows)
    bias = load.tensor(f"{kv_name}.bias", sizes.row)
    return Linear(weight, torch.cat((q_bias, _row_in_halves(bias, sizes, sizes.kv_rank))))


def _q_in_halves(rows: torch.Tensor, sizes: LatentSizes) -> torch.Tensor:
    return halves_of_pairs(rows, sizes.head, sizes.rope, sizes.nope) if sizes.pairs else rows


def _row_in_halves(rows: torch.Tensor, sizes: LatentSizes, start: int) -> torch.Tensor:
    return halves_of_pairs(rows, start + sizes.rope, sizes.rope, start) if sizes.pairs else rows


def _key_and_value(
    load: Loader, prefix: str, sizes: LatentSizes, mine: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """[heads, nope, kv_rank] and [heads, kv_rank, value] of the matrix that would make both of a latent, of
    the heads that are `mine`."""
    rows = sizes.num_heads * (sizes.nope + sizes.value)
    both = load.tensor(f"{prefix}.kv_b_proj.weight", rows, sizes.kv_rank).view(
        sizes.num_heads, -1, sizes.kv_rank
    )
    k, v = torch.split(both[mine.start : mine.stop], [sizes.nope, sizes.value], 1)
    return own(k), own(v.transpose(1, 2))
