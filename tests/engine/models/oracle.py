"""Tiny checkpoints as transformers saves them, read by both engines in every shape of work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.loader import load_engine
from tests.engine.reading import read_all
from tests.engine.weights.folders import write_folder

LENGTH = 120
ATOL = 1e-4

#: token counts a plan: all at once, a prompt and then token by token, and cuts that fit nothing
SHAPES = {
    "full": (LENGTH,),
    "decode": (70, *(1 for _ in range(50))),
    "irregular": (1, 37, 2, 23, 50, 7),
}


def check(folder: Path, family: str, **changes: Any) -> None:
    """Logits at every position are those of transformers, however the tokens are cut."""
    model = write_folder(folder, family, **changes)
    ids = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    assert theirs.std() > 0.1, "logits that hardly differ would test nothing"
    for shape, chunks in SHAPES.items():
        difference = (ours(folder, ids, chunks) - theirs).abs().max()
        assert difference <= ATOL, f"{shape}: {difference:.2g}"


def ours(folder: Path, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """[positions, vocab], passes of up to 64 tokens."""
    settings = {"dtype": "f32", "type_k": "f32", "type_v": "f32", "threads": 1}
    sizes = {"n_ctx": 256, "max_batch": 128, "max_ubatch": 64, "num_seqs": 1}
    engine = load_engine(folder, EngineConfig.from_mapping({**settings, **sizes}))
    return torch.cat([logits for _, logits in read_all(engine, ids, chunks)])
