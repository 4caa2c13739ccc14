"""Real models in float32 say what transformers says of the same file: at every position, and on and on.

At one position of this text (1,183) Gemma's logits answer to rounding ten times as much as elsewhere: those
of the reference in float32 are 0.0008 away from its own in float64. A prompt read at once is compared with
the float32 ones; other cuts, which round otherwise, with the float64 ones, within the same bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.loader import load_engine
from engine.runner import Engine
from tests.engine.reading import read_all
from tests.text import long_text

pytestmark = pytest.mark.real

#: past Gemma's window of 512 twice
LENGTH = 1200
STEPS = 128
ATOL = 2e-3


@dataclass(frozen=True)
class Pair:
    """Our engine, the reference, and its last hidden states of `ids`, float32 [LENGTH, width]: as it
    computes them in float32, and in float64."""

    engine: Engine
    reference: Any
    ids: list[int]
    hidden: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request: pytest.FixtureRequest) -> Pair:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    settings = {"type_k": "f32", "type_v": "f32", "dtype": "f32", "threads": 1}
    config = {"n_ctx": 2048, "max_batch": LENGTH, "max_ubatch": 512, "num_seqs": 2, **settings}
    engine = load_engine(path, EngineConfig.from_mapping(config))
    ids = engine.tokenizer.encode(long_text())[:LENGTH]
    if engine.tokenizer.add_bos and engine.tokenizer.bos_id is not None:
        ids = [engine.tokenizer.bos_id, *ids[:-1]]
    assert len(ids) == LENGTH
    hidden = {"float32": last_hidden(reference, ids)}
    torch.nn.Module.double(reference)  # the model's own method refuses what came out of a GGUF file
    hidden["float64"] = last_hidden(reference, ids)
    torch.nn.Module.float(reference)
    return Pair(engine, reference, ids, hidden)


def last_hidden(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = reference.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    assert found.dtype == next(reference.parameters()).dtype
    return found.float()


@pytest.mark.parametrize(
    ("chunks", "rounding"),
    [((LENGTH,), "float32"), ((1, 255, 3, 512, 64, 300, 65), "float64"), ((333, 333, 333, 201), "float64")],
    ids=["one plan", "irregular", "equal"],
)
def test_logits_and_top_1_are_those_of_the_reference_at_every_position(
    pair: Pair, chunks: tuple[int, ...], rounding: str
) -> None:
    seen = 0
    for at, ours in read_all(pair.engine, pair.ids, chunks):
        with torch.inference_mode():
            theirs = pair.reference.lm_head(pair.hidden[rounding][at])
        assert (ours - theirs).abs().max() <= ATOL, f"positions {at.start} to {at.stop}"
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1)), f"positions {at.start} to {at.stop}"
        seen += len(ours)
    assert seen == LENGTH


def test_greedy_replies_are_those_of_the_reference(pair: Pair) -> None:
    prompt = pair.ids[:200]
    seq = pair.engine.create()
    pair.engine.feed(seq, prompt)
    ours = [pair.engine.decode([seq])[seq] for _ in range(STEPS)]
    pair.engine.close(seq)
    theirs = []
    with torch.inference_mode():
        out = pair.reference(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        for _ in range(STEPS):
            following = out.logits[:, -1].argmax(-1, keepdim=True)
            theirs.append(int(following))
            out = pair.reference(
                input_ids=following, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1
            )
    assert ours == theirs
