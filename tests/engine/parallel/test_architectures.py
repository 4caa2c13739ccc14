"""Every architecture, divided: what can be is shared among the ranks, and the model is the same.

Ranks are threads here, so that all architectures take as long as one does with processes. Logits are not
those of one rank bit for bit: sums over heads and inner columns are added up in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runner import Engine
from engine.state import SeqId
from tests.engine.parallel.comparing import drift, logits_after, same_bytes, told
from tests.engine.parallel.threads import ThreadGroup, divided
from tests.exact.members import MEMBERS, OTHERS, folder, open_member
from tests.oracles import base

#: Of the largest logit, for rows in f32: measured up to 1.4e-6 (docs/parallel.md has more figures).
DRIFT = 1e-5
PROMPT, MORE = base.tokens(count=40), base.tokens(seed=2, count=8)
FAMILIES = (*MEMBERS, *OTHERS)
#: Of these no rank has less than all: recurrent layers, and attention that looks at all heads at once.
UNDIVIDED = {"mamba", "mamba2", "falcon_mamba", "zamba2"}


def said(engine: Engine) -> tuple[SeqId, torch.Tensor]:
    """A sequence, and its logits after a prompt and behind each of some tokens."""
    seq = engine.create()
    engine.feed(seq, PROMPT)
    return seq, torch.stack([logits_after(engine, seq), *told(engine, seq, MORE)])


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_the_same_model(family: str) -> None:
    """They say what one says, and their states do not show that there were two."""
    alone = open_member(family, "f32")
    _, expected = said(alone)
    with divided(folder(family), 2) as engine:
        seq = engine.create()
        engine.feed(seq, PROMPT)
        first, state = logits_after(engine, seq), engine.snapshot(seq)
        live = torch.stack(told(engine, seq, MORE))
        again = engine.restore(state)
        assert same_bytes(engine.snapshot(again), state)
        assert torch.equal(torch.stack(told(engine, again, MORE)), live), "the same ranks: exact"
    assert drift(torch.cat((first[None], live)), expected) <= DRIFT
    assert state.layout == alone.layout
    assert state.fingerprint.meaning == alone.fingerprint.meaning
    seq = alone.restore(state)
    assert same_bytes(alone.snapshot(seq), state)
    assert drift(torch.stack(told(alone, seq, MORE)), live) <= DRIFT


#: What families may have, and the tiny models as they are have not.
VARIATIONS = (
    ("cohere2", {"attention_bias": True}),
    ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
    ("gemma4", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}),
    ("gemma4", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("nemotron_h", {"moe_latent_size": 32}),
    ("nemotron_h", {"layers_block_type": ("attention", "mlp")}),
    ("phi", {"qk_layernorm": True}),
)


@pytest.mark.parametrize(("family", "changes"), VARIATIONS, ids=str)
def test_variations_of_a_family(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    base.write(family, tmp_path, **changes)
    _, alone = said(base.open_engine(tmp_path))
    with divided(tmp_path, 3) as engine:
        _, together = said(engine)
    assert drift(together, alone) <= DRIFT


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNDIVIDED])
def test_every_rank_is_needed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would prove nothing: without what the second rank adds, it is another model."""
    _, alone = said(open_member(family, "f32"))
    whole = ThreadGroup.total

    def own_term(self: ThreadGroup, x: torch.Tensor) -> torch.Tensor:
        whole(self, x)
        return x.float()

    monkeypatch.setattr(ThreadGroup, "total", own_term)
    with divided(folder(family), 2) as engine:
        _, together = said(engine)
    assert drift(together, alone) > 1000 * DRIFT


@pytest.mark.parametrize("family", ["llama", "gemma4", "minimax_m3", "deepseek_v32", "qwen3_next"])
def test_a_rank_may_have_no_heads(family: str) -> None:
    """Two KV heads (of latent attention: four heads), and five ranks."""
    _, alone = said(open_member(family, "f32"))
    with divided(folder(family), 5) as engine:
        seq, together = said(engine)
        state = engine.snapshot(seq)
        again = engine.restore(state)
        assert same_bytes(engine.snapshot(again), state)
    assert drift(together, alone) <= DRIFT
