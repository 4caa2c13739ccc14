"""From a file's tensors to building blocks: every shape checked, matrices that read one input joined."""

from __future__ import annotations

import torch

from engine.errors import WeightsRefused
from engine.linear import Linear
from engine.models.base import Hparams, Placement, WeightSource
from engine.models.fields import Fields
from engine.models.layers import Activation, Attention, FeedForward, HeadNorm, RmsNorm
from engine.models.sizes import Sizes


class Loader:
    """Tensors of one model, in its dtype and place. Each raises WeightsRefused when a tensor is missing
    or of another shape."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        self._weights = weights
        self._placement = placement

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """In the model's dtype."""
        return self._checked(name, self._placement.dtype, shape)

    def exact(self, name: str, *shape: int) -> torch.Tensor:
        """In float32, for norms."""
        return self._checked(name, torch.float32, shape)

    def linear(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Linear:
        """One matrix out of several that read the same input: `names` without ".weight"."""
        weights = [self.tensor(f"{name}.weight", n, columns) for name, n in zip(names, rows, strict=True)]
        bias = None
        if any(self.has(f"{name}.bias") for name in names):
            bias = torch.cat([self.tensor(f"{name}.bias", n) for name, n in zip(names, rows, strict=True)])
        return Linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def norm(self, name: str, width: int, eps: float) -> RmsNorm:
        return RmsNorm(self.exact(f"{name}.weight", width), eps)

    def norm_from_one(self, name: str, width: int, eps: float) -> RmsNorm:
        """A norm whose weights are stored as what they are above 1."""
        return RmsNorm(self.exact(f"{name}.weight", width) + 1, eps)

    def _checked(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if not self._weights.has(name):
            raise WeightsRefused(f"the model lacks the tensor {name}")
        tensor = self._weights.tensor(name, dtype)
        if tuple(tensor.shape) != shape:
            raise WeightsRefused(f"tensor {name} is {list(tensor.shape)}, not {list(shape)}")
        return tensor.to(self._placement.device)


def halves_of_pairs(rows: torch.Tensor, head_size: int, n_rot: int, start: int = 0) -> torch.Tensor:
    """Rows [heads * head_size, ...] of q or k (a matrix, a bias, a norm's weight) whose RoPE turns value
    2i of a head with value 2i + 1, in the order of halves: i with i + n_rot/2. Only the `n_rot` values of
    each head from `start` on move. Where q and k are both re-ordered, scores are the same."""
    heads = rows.view(-1, head_size, *rows.shape[1:])
    turned = heads[:, start : start + n_rot]
    halves = torch.cat((turned[:, 0::2], turned[:, 1::2]), 1)
    return torch.cat((heads[:, :start], halves, heads[:, start + n_rot :]), 1).flatten(0, 1)


def load_attention(load: Loader, hp: Hparams, layer: int) -> Attention:
    prefix = f"blk.{layer}"
    q_rows, k_rows = hp.num_heads * hp.head_size, hp.num_kv_heads * hp.head_size
    names = (f"{prefix}.attn_q", f"{prefix}.attn_k", f"{prefix}.attn_v")
    return Attention(
        layer=layer,
        qkv=load.linear(names, (q_rows, k_rows, hp.num_kv_heads * hp.head_size_v), hp.width),
        out=load.linear((f"{prefix}.attn_output",), (hp.width,), hp.num_heads * hp.head_size_v),
        num_heads=hp.num_heads,
        num_kv_heads=hp.num_kv_heads,
        head_size=hp.head_size,
        head_size_v=hp.head_size_v,
        scale=hp.scale,
        norm=_load_head_norm(load, hp, prefix),
    )


def load_ffn(load: Loader, hp: Hparams, layer: int, activation: Activation) -> FeedForward:
    prefix = f"blk.{layer}"
    both = (f"{prefix}.ffn_gate", f"{prefix}.ffn_up")
    return FeedForward(
        gate_up=load.linear(both, (hp.ffn_width, hp.ffn_width), hp.width),
        down=load.linear((f"{prefix}.ffn_down",), (hp.width,), hp.ffn_width),
        activation=activation,
    )


def load_head(load: Loader, hp: Hparams, embedding: torch.Tensor) -> Linear:
    """The output matrix: the file's own, or the embedding table again."""
    if load.has("output.weight"):
        return load.linear(("output",), (hp.vocab_size,), hp.width)
    return Linear(embedding)


def _load_head_norm(load: Loader, hp: Hparams, prefix: str) -> HeadNorm | None:
    if not load.has(f"{prefix}.attn_q_norm.weight"):
        return None
    q = load.exact(f"{prefix}.attn_q_norm.weight", hp.head_size).expand(hp.num_heads, -1)
    k = load.exact(f"{prefix}.attn_k_norm.weight", hp.head_size).expand(hp.num_kv_heads, -1)
    return HeadNorm(torch.cat((q, k)), hp.rms_eps)


# -- under the hub's names -------------------------------------------------------------------------------


def hub_prefix(load: Loader) -> str:
    """Where the decoder's tensors are: models that also see or hear keep it deeper inside."""
    for prefix in ("model", "model.language_model", "language_model.model"):
        if load.has(f"{prefix}.embed_tokens.weight"):
            return prefix
    raise WeightsRefused("the model lacks the tensor model.embed_tokens.weight")


def hub_qkv(load: Loader, prefix: str, sizes: Sizes, pairs: int = 0) -> Linear:
    """q, k and v of `prefix`, in this order, with their biases where there are any.

    The first `pairs` pairs of every head of q and k are of consecutive values: they are put into halves.
    """
    q_rows, kv_rows = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
    rows = (q_rows, kv_rows, kv_rows)
    if not pairs:
        return load.linear(names, rows, sizes.width)
    weights = [load.tensor(f"{name}.weight", n, sizes.width) for name, n in zip(names, rows, strict=True)]
    bias = None
    if any(load.has(f"{name}.bias") for name in names):
        biases = [load.tensor(f"{name}.bias", n) for name, n in zip(names, rows, strict=True)]
        bias = torch.cat(_in_halves(biases, sizes.head_size, 2 * pairs))
    return Linear(torch.cat(_in_halves(weights, sizes.head_size, 2 * pairs)), bias)


def _in_halves(qkv: list[torch.Tensor], head_size: int, n_rot: int) -> list[torch.Tensor]:
    q, k, v = qkv
    return [halves_of_pairs(q, head_size, n_rot), halves_of_pairs(k, head_size, n_rot), v]


def hub_attention(
    load: Loader, prefix: str, layer: int, sizes: Sizes, scale: float, pairs: int = 0
) -> Attention:
    """Grouped-query attention whose heads are all of one size; `pairs` as for `hub_qkv`."""
    return Attention(
        layer=layer,
        qkv=hub_qkv(load, prefix, sizes, pairs),
        out=load.linear((f"{prefix}.o_proj",), (sizes.width,), sizes.num_heads * sizes.head_size),
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_size=sizes.head_size,
        head_size_v=sizes.head_size,
        scale=scale,
        norm=None,
    )


def hub_ffn(load: Loader, prefix: str, width: int, inner: int, activation: Activation) -> FeedForward:
    """A gated feed-forward of `inner` values."""
    return FeedForward(
        gate_up=load.linear((f"{prefix}.gate_proj", f"{prefix}.up_proj"), (inner, inner), width),
        down=load.linear((f"{prefix}.down_proj",), (width,), inner),
        activation=activation,
    )


def hub_head(load: Loader, fields: Fields, sizes: Sizes, embedding: torch.Tensor, tied: bool) -> Linear:
    """The output matrix: `lm_head`, or the embedding table where the two are tied; `tied` is the default. A
    file that says that they are, and has an `lm_head` of other values, means that one."""
    deeper = load.has("language_model.lm_head.weight")
    name = "language_model.lm_head" if deeper else "lm_head"
    if fields.flag("tie_word_embeddings", tied):
        has_own = load.has(f"{name}.weight")
        if not has_own or torch.equal(load.tensor(f"{name}.weight", *embedding.shape), embedding):
            return Linear(embedding)
    return load.linear((name,), (sizes.vocab_size,), sizes.width)


def check_bias(load: Loader, fields: Fields, name: str, default: bool, flag: str = "attention_bias") -> None:
    """Refuses weights that have not the bias `name` though the configuration says so, or have it unsaid."""
    if fields.flag(flag, default) != load.has(f"{name}.bias"):
        raise fields.refused(flag, not load.has(f"{name}.bias"))
