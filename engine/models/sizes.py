"""The sizes that nearly every decoder of the hub has, under the names that most of them give them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.fields import Fields

#: words of layer_types
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
#: what files of the hub call them, and transformers did once
_OLDER = {
    "attention": FULL,
    "deepseek_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
    "qwen_sparse_attention": "indexed_attention",
}

_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts, and sizes in values."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    n_ctx_train: int


def read_sizes(fields: Fields, default_context: int | None = None) -> Sizes:
    """Raises WeightsRefused where one is missing or they do not fit together, and for quantized weights.
    `default_context` is for families that say no length that they were trained for."""
    fields.only("quantization_config", None)
    width, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if not fields.has("head_dim") and width % num_heads:
        raise fields.refused("num_attention_heads", num_heads)
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refused("num_key_value_heads", num_kv_heads)
    return Sizes(
        num_layers=fields.count("num_hidden_layers", most=_MAX_LAYERS),
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=fields.count("head_dim", width // num_heads),
        vocab_size=fields.count("vocab_size"),
        n_ctx_train=fields.count("max_position_embeddings", default_context),
    )


def read_layer_types(fields: Fields, allowed: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    """Of each layer one of `allowed`; `default` is what a file means that says nothing."""
    if not fields.has("layer_types"):
        return default
    older = (word for word, meant in _OLDER.items() if meant in allowed)
    words = fields.words("layer_types", len(default), (*allowed, *older))
    return tuple(_OLDER.get(word, word) for word in words)
