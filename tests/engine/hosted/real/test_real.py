"""A real model that transformers has loaded says through our engine what its own `generate` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.hosted.host import host
from engine.loader import load_engine
from tests.text import long_text

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_smollm2_says_what_generate_says_and_goes_on_from_its_state(smollm2_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    engine = host(model, None, EngineConfig(n_ctx=1024), name="SmolLM2")
    ids = load_engine(smollm2_path).tokenizer.encode(long_text())[:100]
    with torch.inference_mode():
        given = torch.tensor([ids])
        whole = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False
        )
    seq = engine.create()
    engine.feed(seq, ids)
    said = [piece.token for piece in engine.generate(seq, 5)]
    restored = engine.restore(engine.snapshot(seq))
    said += [piece.token for piece in engine.generate(restored, 7)]
    assert said == whole[0, len(ids) :].tolist()
