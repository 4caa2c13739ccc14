"""MSA: which blocks are chosen, against a definition in plain Python."""

from __future__ import annotations

import pytest
import torch

from engine.cache.attention import Scoring, narrowed
from engine.cache.msa import QUERIES, BlockLaw, choose_blocks, choose_tokens


def tokens_by_definition(
    q: torch.Tensor, at: list[int], keys: torch.Tensor, keys_at: list[int], law: BlockLaw
) -> set[tuple[int, int, int]]:
    """(group, query, key) of every key in a chosen block, one query at a time."""
    out = set()
    for group in range(q.shape[1]):
        for query, position in enumerate(at):
            scores: dict[int, float] = {}
            for key, key_at in enumerate(keys_at):
                if key_at <= position:
                    score = float(q[query, group] @ keys[key])
                    block = key_at // law.size
                    scores[block] = max(score, scores.get(block, -torch.inf))
            own = position // law.size
            local = {block for block in range(own - law.local + 1, own + 1) if block >= 0}
            others = sorted(scores.keys() - local, key=lambda block: (-scores[block], block))
            chosen = local | set(others[: law.chosen - len(local)])
            out |= {(group, query, key) for key, key_at in enumerate(keys_at) if key_at // law.size in chosen}
    return out


@pytest.mark.parametrize("law", [BlockLaw(4, 3, 1), BlockLaw(1, 5, 2), BlockLaw(5, 2, 2), BlockLaw(3, 4, 0)])
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "with holes"])
def test_every_group_chooses_by_its_best_tokens(law: BlockLaw, holes: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    keys_at = [at for at in range(41) if not (holes and (at in (0, 7, 22) or 9 <= at < 14))]
    at = keys_at[-17:]
    # Small whole numbers: sums are exact and often equal.
    q = torch.randint(-2, 3, (len(at), 2, 3), generator=generator).float()
    keys = torch.randint(-2, 3, (len(keys_at), 3), generator=generator).float()
    picked = choose_tokens(q, torch.tensor(at), keys, torch.tensor(keys_at), law)
    causal = torch.tensor(keys_at) <= torch.tensor(at)[:, None]
    expected = tokens_by_definition(q, at, keys, keys_at, law)
    seen = {(g, i, j) for g, i, j in expected if keys_at[j] <= at[i]}
    assert {tuple(index) for index in (picked & causal).nonzero().tolist()} == seen


def test_queries_scored_in_pieces_choose_the_same() -> None:
    generator = torch.Generator().manual_seed(4)
    count = 2 * QUERIES + 3
    q, keys = (torch.randn(shape, generator=generator) for shape in ((count, 2, 8), (count, 8)))
    at, law = torch.arange(count), BlockLaw(4, 3, 1)
    whole = choose_tokens(q, at, keys, at, law)
    for query in (0, QUERIES - 1, QUERIES, count - 1):
        seen = slice(0, query + 1)
        one = choose_tokens(q[query : query + 1], at[query : query + 1], keys[seen], at[seen], law)
        assert torch.equal(one[:, 0], whole[:, query, seen])


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])], ids=["", "sinks"])
def test_one_query_reads_what_it_would_among_others(sinks: torch.Tensor | None) -> None:
    """Alone it gathers the rows that each key-value head has picked; among others it is masked."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((2, 6, 8), (11, 3, 8), (11, 3, 8)))
    picked = torch.rand((3, 2, 11), generator=generator) > 0.5
    both = narrowed(q, k, v, None, picked, Scoring(0.3, sinks=sinks))
    for query in range(2):
        at = slice(query, query + 1)
        alone = narrowed(q[at], k, v, None, picked[:, at], Scoring(0.3, sinks=sinks))
        assert torch.allclose(alone, both[at], atol=1e-6)


def test_a_querys_own_block_is_chosen_whatever_its_score() -> None:
    law, scores = BlockLaw(4, 1, 1), torch.full((1, 12, 3), 9.0)
    at = torch.arange(12)
    picked = choose_blocks(scores.masked_fill(at[:, None] // 4 == torch.arange(3), -9.0), at, law)
    assert torch.equal(picked[0], at[:, None] // 4 == torch.arange(3))
