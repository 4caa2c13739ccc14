"""Random models in GGUF for llama.cpp to run, one for each kind of memory that the real ones do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np

from serialization.foreign.geometry import (
    CacheRole,
    CellExtension,
    Geometry,
    LayerRows,
    RecurrentCache,
    RowsCache,
    StateLayer,
)

VOCAB, HIDDEN, FEED, HEAD = 256, 64, 96, 16
INNER, STATE, STEP, CONV = 128, 8, 4, 4

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _norms(layer: int) -> Shapes:
    yield f"blk.{layer}.attn_norm.weight", (HIDDEN,)


def _feed_forward(layer: int) -> Shapes:
    yield f"blk.{layer}.ffn_norm.weight", (HIDDEN,)
    yield f"blk.{layer}.ffn_gate.weight", (FEED, HIDDEN)
    yield f"blk.{layer}.ffn_up.weight", (FEED, HIDDEN)
    yield f"blk.{layer}.ffn_down.weight", (HIDDEN, FEED)


def _attention(layer: int) -> Shapes:
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        yield f"blk.{layer}.attn_{name}.weight", (heads * HEAD, HIDDEN)
    yield f"blk.{layer}.attn_output.weight", (HIDDEN, 4 * HEAD)


def _biases(layer: int) -> Shapes:
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        yield f"blk.{layer}.attn_{name}.bias", (heads * HEAD,)


def _state_space(layer: int) -> Shapes:
    at = f"blk.{layer}.ssm"
    yield f"{at}_in.weight", (2 * INNER, HIDDEN)
    yield f"{at}_conv1d.weight", (INNER, CONV)
    yield f"{at}_conv1d.bias", (INNER,)
    yield f"{at}_x.weight", (STEP + 2 * STATE, INNER)
    yield f"{at}_dt.weight", (INNER, STEP)
    yield f"{at}_dt.bias", (INNER,)
    yield f"{at}_a", (INNER, STATE)
    yield f"{at}_d", (INNER,)
    yield f"{at}_out.weight", (HIDDEN, INNER)


def _inner_norms(layer: int) -> Shapes:
    for name, size in (("dt", STEP), ("b", STATE), ("c", STATE)):
        yield f"blk.{layer}.ssm_{name}_norm.weight", (size,)


def _write(
    path: Path, architecture: str, layers: list[list[Callable[[int], Shapes]]], kv_heads: int | list[int]
) -> Path:
    noise = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(len(layers))
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(4)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(STEP)
    writer.add_rope_dimension_sections([2, 3, 3, 0])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCAB)
    shapes = [("token_embd.weight", (VOCAB, HIDDEN)), ("output_norm.weight", (HIDDEN,))]
    shapes += [("output.weight", (VOCAB, HIDDEN))]
    shapes += [each for layer, parts in enumerate(layers) for part in parts for each in part(layer)]
    for name, shape in shapes:
        values = noise.standard_normal(shape) / np.sqrt(shape[-1])
        if name.endswith("ssm_a"):
            values = -0.5 - np.abs(values)  # a state that forgets
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rows(*layers: int) -> RowsCache:
    return RowsCache(CacheRole.FULL, tuple(LayerRows(each, 2, HEAD, HEAD, HEAD) for each in layers))


def _states(num_layers: int, *layers: int) -> RecurrentCache:
    values = (CONV - 1) * INNER, STATE * INNER
    return RecurrentCache(num_layers, tuple(StateLayer(each, *values) for each in layers))


#: name -> (its geometry, what writes it to a path)
TINY: dict[str, tuple[Geometry, Callable[[Path], Path]]] = {
    "mamba": (
        Geometry("mamba", VOCAB, 2, (_states(2, 0, 1),)),
        lambda path: _write(path, "mamba", [[_norms, _state_space]] * 2, 0),
    ),
    "jamba": (
        Geometry("jamba", VOCAB, 3, (_rows(1), _states(3, 0, 2))),
        lambda path: _write(
            path,
            "jamba",
            [
                [_norms, _state_space, _inner_norms, _feed_forward],
                [_norms, _attention, _feed_forward],
                [_norms, _state_space, _inner_norms, _feed_forward],
            ],
            [0, 2, 0],
        ),
    ),
    "qwen2vl": (
        Geometry("qwen2vl", VOCAB, 2, (_rows(0, 1),), CellExtension.POSITION_2D),
        lambda path: _write(path, "qwen2vl", [[_norms, _attention, _biases, _feed_forward]] * 2, 2),
    ),
}
