"""Speed of one architecture of every member of the family: about a hundred million random weights in float32,
with heads and states of the sizes that published models have, on one thread.

python -m benchmarks members [architecture...]

transformers runs the same model in the same process, in turns. Times are those of the processor, so that a
busy machine disturbs them less.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import tell
from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from engine.state import Layout, PartKind
from tests.engine.weights.folders import write_tokenizer
from tests.oracles.base import randomize

DEPTHS, STEPS, ROUNDS = (1024, 2048), 16, 1

_COMMON = {"vocab_size": 8000, "hidden_size": 768, "num_hidden_layers": 8, "max_position_embeddings": 16384}
_ROUTED = {"moe_intermediate_size": 256, "num_experts_per_tok": 4}
_MANY = {"n_routed_experts": 16, "n_shared_experts": 1, **_ROUTED}
_LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_INDEX = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 512}
_GROUPED = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
_DELTA = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_experts": 16,
    "shared_expert_intermediate_size": 256,
}
_WINDOW, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)

#: architecture -> what its test oracle is changed to
SIZES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {**_COMMON, **_LATENT, **_MANY, "intermediate_size": 2048},
    "deepseek_v32": {**_COMMON, **_LATENT, **_MANY, **_INDEX, "intermediate_size": 2048},
    "dots3_note": {
        **_COMMON,
        **_LATENT,
        **_MANY,
        **_INDEX,
        "intermediate_size": 2048,
        "head_dim": 192,
        "layer_types": (
            *["indexed_attention"] * 2,
            *["sliding_attention"] * 3,
            "indexed_attention",
            *["sliding_attention"] * 2,
        ),
        "sliding_window": 256,
        "shared_experts_intermediate_size": 256,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "swa_q_lora_rank": 384,
        "swa_kv_lora_rank": 512,
        "swa_head_dim": 192,
        "swa_qk_nope_head_dim": 128,
        "swa_v_head_dim": 128,
    },
    "deepseek_v4": {
        **_COMMON,
        **_MANY,
        **_INDEX,
        "index_topk": 128,
        "num_attention_heads": 16,
        "head_dim": 128,
        "q_lora_rank": 384,
        "sliding_window": 128,
        "o_groups": 4,
        "o_lora_rank": 192,
        "hc_mult": 4,
        "heavy": 128,
        "layer_types": (_WINDOW, _SPARSE, *(_HEAVY, _SPARSE) * 3),
        "mlp_layer_types": (*["hash_moe"] * 2, *["moe"] * 6),
    },
    "minimax_m3": {
        **_COMMON,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rotary_dim": 32,
        "intermediate_size": 256,
        "dense_intermediate_size": 2048,
        "shared_intermediate_size": 256,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 64,
        "index_topk_blocks": 8,
        "layer_types": ("full_attention", *["minimax_m3_sparse"] * 7),
        "mlp_layer_types": ("dense", *["sparse"] * 7),
    },
    "mamba2": {
        "vocab_size": 8000,
        "hidden_size": 768,
        "num_hidden_layers": 16,
        "state_size": 128,
        "num_heads": 24,
        "head_dim": 64,
        "n_groups": 1,
        "chunk_size": 256,
    },
    "mamba": {"vocab_size": 8000, "hidden_size": 768, "num_hidden_layers": 16, "state_size": 16},
    "falcon_h1": {
        **_COMMON,
        **_GROUPED,
        "intermediate_size": 2048,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_chunk_size": 256,
    },
    "qwen3_next": {**_COMMON, **_DELTA, **_ROUTED, **_GROUPED, "num_attention_heads": 8, "head_dim": 128},
    "kimi_linear": {
        **_COMMON,
        **_LATENT,
        **_ROUTED,
        "q_lora_rank": None,
        "intermediate_size": 2048,
        "num_local_experts": 16,
        "linear_head_dim": 128,
        "linear_num_heads": 8,
        "layer_types": (*["linear_attention"] * 3, "full_attention") * 2,
        "mlp_layer_types": ("dense", *["sparse"] * 7),
    },
    "recurrent_gemma": {
        "vocab_size": 8000,
        "hidden_size": 768,
        "intermediate_size": 4608,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "lru_width": 768,
        "attention_window_size": 1024,
    },
    "qwen4_exp": {
        **_COMMON,
        **_DELTA,
        **_ROUTED,
        **_GROUPED,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "head_dim": 128,
        "layer_types": (*["linear_attention"] * 3, "indexed_attention") * 2,
        "hc_count": 4,
        "hc_lowrank": 64,
        "indexer_head_dim": 128,
        "indexer_budget": 512,
        "indexer_compress_ratio": 16,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 512,
        "ngram_vocab_size_base": 4096,
    },
    "glm5_next": {
        **_COMMON,
        **_LATENT,
        **_MANY,
        **_INDEX,
        "qk_rope_head_dim": 0,
        "intermediate_size": 2048,
        "index_kpool": 16,
        "linear_head_dim": 128,
        "linear_num_heads": 8,
        "hc_mult": 4,
        "layer_types": (*["linear_attention"] * 3, "indexed_attention") * 2,
        "indexer_types": ("full",) * 8,
        "mlp_layer_types": ("dense", *["sparse"] * 7),
    },
    "gpt_oss": {
        **_COMMON,
        **_GROUPED,
        "intermediate_size": 256,
        "sliding_window": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
    },
    "llama4": {
        **_COMMON,
        **_GROUPED,
        "intermediate_size": 768,
        "intermediate_size_mlp": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 1024,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
}


def run(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or SIZES:
        rival = _transformers(name)
        _measure(name, _engine(rival), rival)


def _transformers(name: str) -> Any:
    make = importlib.import_module(f"tests.oracles.{name}").make
    cls, config = make(**SIZES[name])
    torch.manual_seed(0)
    model = cls._from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


def _engine(rival: Any) -> Engine:
    plain = {"dtype": "f32", "type_k": "f32", "type_v": "f32", "threads": 1}
    sizes = {"n_ctx": 8192, "num_cells": 8192, "num_seqs": 1, "max_batch": 2048, "max_ubatch": 512}
    with tempfile.TemporaryDirectory() as folder:
        rival.save_pretrained(folder)
        write_tokenizer(Path(folder))
        return load_engine(Path(folder), EngineConfig.from_mapping({**plain, **sizes}))


def _measure(name: str, engine: Engine, rival: Any) -> None:
    growing, fixed = state_bytes(engine.layout)
    millions = sum(p.numel() for p in rival.parameters()) / 1e6
    tell("state", architecture=name, parameters_M=millions, bytes_per_token=growing, fixed_bytes=fixed)
    ours: dict[int, list[tuple[float, float]]] = {depth: [] for depth in DEPTHS}
    theirs: dict[int, list[tuple[float, float]]] = {depth: [] for depth in DEPTHS}
    for turn in range(ROUNDS):
        for depth in DEPTHS:
            drawn = torch.Generator().manual_seed(depth + turn)  # no two share a prefix
            ids = torch.randint(0, 256, (depth,), generator=drawn).tolist()
            ours[depth].append(_ours(engine, ids))
            theirs[depth].append(_theirs(rival, ids))
    for depth in DEPTHS:
        (read, step), (read_too, step_too) = (
            [min(column) for column in zip(*of, strict=True)] for of in (ours[depth], theirs[depth])
        )
        tell(f"prefill of {depth:,}", architecture=name, tokens_s=depth / read, ratio=read_too / read)
        tell(f"decode at depth {depth:,}", architecture=name, ms_token=1e3 * step, ratio=step_too / step)


def state_bytes(layout: Layout) -> tuple[int, int]:
    """What a state grows by with every token, and what windows and point state take whatever its length."""
    growing, fixed = 0.0, 0
    for part in layout:
        if part.kind in (PartKind.TOKEN, PartKind.BLOCK):
            growing += part.row_nbytes / part.block
        else:
            fixed += part.row_nbytes * (part.window or 1)
    return round(growing), fixed


def _ours(engine: Engine, ids: list[int]) -> tuple[float, float]:
    """Seconds of reading, and of one more token."""
    seq = engine.create()
    started = time.process_time()
    engine.feed(seq, ids)
    read = time.process_time()
    for _ in range(STEPS):
        engine.decode([seq])
    done = time.process_time()
    engine.close(seq)
    return read - started, (done - read) / STEPS


def _theirs(model: Any, ids: list[int]) -> tuple[float, float]:
    """As `_ours`."""
    with torch.inference_mode():
        given = torch.tensor([ids])
        started = time.process_time()
        out = model(input_ids=given, use_cache=True, logits_to_keep=1)
        read = time.process_time()
        for _ in range(STEPS):
            following = out.logits[:, -1].argmax(-1, keepdim=True)
            cache = {key: out[key] for key in ("past_key_values", "cache_params") if key in out}
            out = model(input_ids=following, use_cache=True, **cache)
        done = time.process_time()
    return read - started, (done - read) / STEPS
