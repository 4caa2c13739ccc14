"""Tiny models with random weights as transformers builds, runs and saves them: the independent reference.

A family is a module here with `make()`, which returns the class and the configuration.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from tests.engine.reading import read_all
from tests.engine.weights.folders import VOCAB, write_tokenizer

#: ids that mean something to a model, kept inside of the vocabulary
TOKEN_IDS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 256, "eos_token_id": 257}
LENGTH = 64

#: token counts a plan: all at once, a prompt and then token by token, and cuts that fit nothing
SHAPES = {
    "full": (LENGTH,),
    "decode": (40, *(1 for _ in range(LENGTH - 40))),
    "irregular": (13, 27, 1, 7, 16),
}


def tokens(seed: int = 1, count: int = LENGTH) -> list[int]:
    """Random ids of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


@functools.cache
def build(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """The model of `tests.oracles.<family>` in float32, every parameter drawn anew. `changes` go to its
    `make`."""
    cls, config = importlib.import_module(f"tests.oracles.{family}").make(**changes)
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """The library's own start (norms 1, biases 0, deviation 0.02) would hide mistakes: matrices are drawn
    with deviation 1/sqrt(inputs), vectors moved by 0.1. Decays stay: states neither vanish nor explode."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if "A_log" in name:
            continue
        if parameter.dim() < 2 or parameter.numel() == parameter.shape[-1]:
            parameter.add_(0.1 * drawn)
        elif "embed" in name and parameter.shape[0] >= VOCAB:
            parameter.copy_(drawn)
        else:
            parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "expert_bias" in name or "layer_scalar" in name:
            buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))


def write(family: str, folder: Path, **changes: Any) -> transformers.PreTrainedModel:
    """Save the family's model and a byte-level tokenizer into `folder`, as a hub would have them."""
    model = build(family, **changes)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def open_engine(folder: Path, **settings: Any) -> Engine:
    """A float32 engine with small batches, changed by `settings`."""
    plain = {"dtype": "f32", "type_k": "f32", "type_v": "f32", "threads": 1}
    sizes = {"n_ctx": 256, "max_batch": 64, "max_ubatch": 64, "num_seqs": 4, "num_cells": 1024}
    return load_engine(folder, EngineConfig.from_mapping({**plain, **sizes, **settings}))


def reference(family: str, ids: Sequence[int], **changes: Any) -> torch.Tensor:
    """float32 [tokens, vocab] of one full pass of the reference."""
    with torch.inference_mode():
        logits: torch.Tensor = build(family, **changes)(
            input_ids=torch.tensor([list(ids)]), use_cache=False
        ).logits
    return logits[0]


def check_numbers(family: str, folder: Path, atol: float = 1e-4, **changes: Any) -> None:
    """Logits at every position are the reference's full pass, however the tokens are cut."""
    write(family, folder, **changes)
    ids = tokens()
    theirs = reference(family, ids, **changes)
    assert theirs.std() > 0.1, "logits that hardly differ would test nothing"
    engine = open_engine(folder)
    for shape, chunks in SHAPES.items():
        ours = torch.cat([logits for _, logits in read_all(engine, ids, chunks)])
        difference = float((ours - theirs).abs().max())
        assert difference <= atol, f"{family}, {shape}: {difference:.2g}"
