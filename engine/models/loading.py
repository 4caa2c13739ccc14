"""From a file's tensors to building blocks: every shape checked, matrices that read one input joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.errors import WeightsRefused
from engine.linear import Linear
from engine.models.base import Hparams, Placement, WeightSource
from engine.models.fields import Fields
from engine.models.layers import Activation, Attention, FeedForward, HeadNorm, Projection, RmsNorm
from engine.models.sizes import Sizes
from engine.parallel.ranks import ALONE, Ranks, Summed
from engine.parallel.share import HeadShare, Share, moved, values_of


class Loader:
    """Tensors of one model, in its dtype and place. Each raises WeightsRefused when a tensor is missing
    or of another shape.

    Tensors are read whole, one at a time; where ranks share one, only this rank's part of it is kept.
    """

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        self._weights = weights
        self._placement = placement

    @property
    def ranks(self) -> Ranks:
        return self._placement.ranks

    @property
    def share(self) -> Share:
        return self._placement.ranks.share

    @property
    def mirrored(self) -> Loader:
        """Loads what every rank has all of."""
        return Loader(self._weights, replace(self._placement, ranks=ALONE))

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """In the model's dtype."""
        return self._checked(name, self._placement.dtype, shape)

    def exact(self, name: str, *shape: int) -> torch.Tensor:
        """In float32, for norms."""
        return self._checked(name, torch.float32, shape)

    def linear(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        keep: Sequence[slice] | None = None,
    ) -> Linear:
        """One matrix out of several that read the same input: `names` without ".weight". `keep` says which
        rows of it are this rank's, in order; all, where it does not."""
        each = tuple(zip(names, rows, strict=True))
        weight = self._joined([(f"{name}.weight", (n, columns)) for name, n in each], keep)
        bias = None
        if any(self.has(f"{name}.bias") for name in names):
            bias = self._joined([(f"{name}.bias", (n,)) for name, n in each], keep)
        return Linear(weight, bias)

    def summed(self, name: str, rows: int, columns: int, keep: slice) -> Projection:
        """The matrix `name` [rows, columns], without ".weight", of whose columns `keep` are this rank's; what
        it gives is the sum over all ranks."""
        bias = self.tensor(f"{name}.bias", rows) if self.has(f"{name}.bias") else None
        weight = self.tensor(f"{name}.weight", rows, columns)
        return self.adding(weight if self.share.size == 1 else own(weight[:, keep]), bias)

    def adding(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
        """A matrix of which `weight` [rows, some columns] is this rank's; what it gives is the sum."""
        return Linear(weight, bias) if self.share.size == 1 else Summed(weight, bias, self.ranks)

    def _joined(
        self, tensors: Sequence[tuple[str, tuple[int, ...]]], keep: Sequence[slice] | None
    ) -> torch.Tensor:
        """Tensors above each other, or of their rows those of `keep`."""
        pieces, above = [], 0
        for name, shape in tensors:
            tensor = self.tensor(name, *shape)
            if keep is None or self.share.size == 1:
                pieces.append(tensor)
            else:
                inside = (moved(some, -above) for some in keep)
                pieces += [own(tensor[max(0, some.start) : max(0, some.stop)]) for some in inside]
            above += shape[0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

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


def own(part: torch.Tensor) -> torch.Tensor:
    """A copy that does not keep the whole in memory."""
    return part.clone(memory_format=torch.contiguous_format)


def gated(
    load: Loader, gate_up: tuple[str, ...], down: str, width: int, inner: int, activation: Activation
) -> FeedForward:
    """A feed-forward of `inner` values, which the ranks share. The matrices of the gate and of up have a name
    each, or one for both; the activation is of every value by itself."""
    mine = values_of(load.share.columns(inner), 1)
    rows = (inner, inner) if len(gate_up) == 2 else (2 * inner,)
    return FeedForward(
        gate_up=load.linear(gate_up, rows, width, (mine, moved(mine, inner))),
        down=load.summed(down, width, inner, mine),
        activation=activation,
    )


def load_attention(load: Loader, hp: Hparams, layer: int) -> Attention:
    prefix, mine = f"blk.{layer}", load.share.heads(hp.num_heads, hp.num_kv_heads)
    q_rows, k_rows = hp.num_heads * hp.head_size, hp.num_kv_heads * hp.head_size
    names = (f"{prefix}.attn_q", f"{prefix}.attn_k", f"{prefix}.attn_v")
    return Attention(
        layer=layer,
        qkv=load.linear(
            names,
            (q_rows, k_rows, hp.num_kv_heads * hp.head_size_v),
            hp.width,
            mine.joined(hp.head_size, hp.head_size_v),
        ),
        out=load.summed(
            f"{prefix}.attn_output",
            hp.width,
            hp.num_heads * hp.head_size_v,
            values_of(mine.q, hp.head_size_v),
        ),
        num_heads=len(mine.q),
        num_kv_heads=len(mine.kv),
        head_size=hp.head_size,
        head_size_v=hp.head_size_v,
        scale=hp.scale,
        norm=_load_head_norm(load, hp, prefix, mine),
    )


def load_ffn(load: Loader, hp: Hparams, layer: int, activation: Activation) -> FeedForward:
    prefix = f"blk.{layer}"
    both = (f"{prefix}.ffn_gate", f"{prefix}.ffn_up")
    return gated(load, both, f"{prefix}.ffn_down", hp.width, hp.ffn_width, activation)


def load_head(load: Loader, hp: Hparams, embedding: torch.Tensor) -> Linear:
    """The output matrix: the file's own, or the embedding table again."""
    if load.has("output.weight"):
        return output_matrix(load, "output", hp.vocab_size, hp.width)
    return tied_head(load, embedding)


def output_matrix(load: Loader, name: str, vocab_size: int, width: int) -> Linear:
    """Rank 0's; the others keep none of it, and are asked for no logits."""
    return load.linear((name,), (vocab_size,), width, (values_of(load.share.ends(vocab_size), 1),))


def tied_head(load: Loader, embedding: torch.Tensor) -> Linear:
    """The same, of the embedding table."""
    mine = load.share.ends(len(embedding))
    return Linear(embedding if mine else embedding.new_empty((0, embedding.shape[1])))


def _load_head_norm(load: Loader, hp: Hparams, prefix: str, mine: HeadShare) -> HeadNorm | None:
    if not load.has(f"{prefix}.attn_q_norm.weight"):
        return None
    q = load.exact(f"{prefix}.attn_q_norm.weight", hp.head_size).expand(len(mine.q), -1)
    k = load.exact(f"{prefix}.attn_k_norm.weight", hp.head_size).expand(len(mine.kv), -1)
    return HeadNorm(torch.cat((q, k)), hp.rms_eps)


# -- under the hub's names -------------------------------------------------------------------------------


def hub_prefix(load: Loader) -> str:
    """Where the decoder's tensors are: models that also see or hear keep it deeper inside."""
    for prefix in ("model", "model.language_model", "language_model.model"):
        if load.has(f"{prefix}.embed_tokens.weight"):
            return prefix
    raise WeightsRefused("the model lacks the tensor model.embed_tokens.weight")


def hub_qkv(load: Loader, prefix: str, sizes: Sizes, pairs: int = 0) -> Linear:
    """This rank's heads of q, k and v of `prefix`, in this order, with their biases where there are any.

    The first `pairs` pairs of every head of q and k are of consecutive values: they are put into halves.
    """
    q_rows, kv_rows = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
    rows = (q_rows, kv_rows, kv_rows)
    mine = load.share.heads(sizes.num_heads, sizes.num_kv_heads)
    if not pairs:
        return load.linear(names, rows, sizes.width, mine.joined(sizes.head_size, sizes.head_size))
    each = tuple(zip(names, rows, mine.each(sizes.head_size, sizes.head_size), strict=True))
    weights = [load.tensor(f"{name}.weight", n, sizes.width)[keep] for name, n, keep in each]
    bias = None
    if any(load.has(f"{name}.bias") for name in names):
        biases = [load.tensor(f"{name}.bias", n)[keep] for name, n, keep in each]
        bias = torch.cat(_in_halves(biases, sizes.head_size, 2 * pairs))
    return Linear(torch.cat(_in_halves(weights, sizes.head_size, 2 * pairs)), bias)


def hub_out(load: Loader, name: str, sizes: Sizes) -> Projection:
    """The matrix behind the heads of one size, of this rank's of them."""
    keep = values_of(load.share.heads(sizes.num_heads, sizes.num_kv_heads).q, sizes.head_size)
    return load.summed(name, sizes.width, sizes.num_heads * sizes.head_size, keep)


def local(load: Loader, sizes: Sizes) -> Sizes:
    """The same with the heads that this rank has."""
    mine = load.share.heads(sizes.num_heads, sizes.num_kv_heads)
    return replace(sizes, num_heads=len(mine.q), num_kv_heads=len(mine.kv))


def _in_halves(qkv: list[torch.Tensor], head_size: int, n_rot: int) -> list[torch.Tensor]:
    q, k, v = qkv
    return [halves_of_pairs(q, head_size, n_rot), halves_of_pairs(k, head_size, n_rot), v]


def hub_attention(
    load: Loader, prefix: str, layer: int, sizes: Sizes, scale: float, pairs: int = 0
) -> Attention:
    """Grouped-query attention whose heads are all of one size; `pairs` as for `hub_qkv`."""
    mine = local(load, sizes)
    return Attention(
        layer=layer,
        qkv=hub_qkv(load, prefix, sizes, pairs),
        out=hub_out(load, f"{prefix}.o_proj", sizes),
        num_heads=mine.num_heads,
        num_kv_heads=mine.num_kv_heads,
        head_size=sizes.head_size,
        head_size_v=sizes.head_size,
        scale=scale,
        norm=None,
    )


def hub_ffn(load: Loader, prefix: str, width: int, inner: int, activation: Activation) -> FeedForward:
    """A gated feed-forward of `inner` values."""
    both = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    return gated(load, both, f"{prefix}.down_proj", width, inner, activation)


def hub_head(load: Loader, fields: Fields, sizes: Sizes, embedding: torch.Tensor, tied: bool) -> Linear:
    """The output matrix: `lm_head`, or the embedding table where the two are tied; `tied` is the default. A
    file that says that they are, and has an `lm_head` of other values, means that one."""
    deeper = load.has("language_model.lm_head.weight")
    name = "language_model.lm_head" if deeper else "lm_head"
    if fields.flag("tie_word_embeddings", tied):
        has_own = load.has(f"{name}.weight")
        if not has_own or torch.equal(load.tensor(f"{name}.weight", *embedding.shape), embedding):
            return tied_head(load, embedding)
    return output_matrix(load, name, sizes.vocab_size, sizes.width)


def check_bias(load: Loader, fields: Fields, name: str, default: bool, flag: str = "attention_bias") -> None:
    """Refuses weights that have not the bias `name` though the configuration says so, or have it unsaid."""
    if fields.flag(flag, default) != load.has(f"{name}.bias"):
        raise fields.refused(flag, not load.has(f"{name}.bias"))
