"""The ids before a token are what the sequence says, wherever ubatches, states and forks cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.batch import Batch, Ints
from engine.cache.memory import NULL_TOKEN, Memory
from engine.cache.parts_memory import PartsMemory
from engine.state import SeqId
from tests.engine.cache.harness import A, B, C, interleaved
from tests.engine.cache.members import compute, member_spec, next_batch, tiny_memory

COUNT = 4
KINDS = ("kv", "iswa", "recurrent", "hybrid_idx")
kinds = pytest.mark.parametrize("kind", KINDS)
PAST = [100 + i for i in range(17)]


def memory_of(kind: str, max_ubatch: int = 32) -> PartsMemory:
    return tiny_memory(member_spec(kind, max_ubatch=max_ubatch))


def previous(memory: Memory, batch: Batch) -> Ints:
    """[rows of the batch, COUNT]; the batch is committed, with rows that nobody reads."""
    out = np.full((len(batch), COUNT), 99)
    plan = memory.plan(batch)
    for index, ubatch in enumerate(plan.ubatches):
        out[ubatch.rows] = plan.apply(index).previous_tokens(COUNT)
    plan.commit()
    return out


def fed(memory: Memory, seq: SeqId, tokens: Sequence[int]) -> Ints:
    return previous(memory, next_batch(memory, (seq, tokens)))


def expected(tokens: Sequence[int], start: int = 0) -> Ints:
    padded = [NULL_TOKEN] * COUNT + list(tokens)
    return np.array([padded[i : i + COUNT] for i in range(start, len(tokens))])


@kinds
@pytest.mark.parametrize("max_ubatch", [1, 2, 3, 5, 32])
def test_ubatches_have_no_borders(kind: str, max_ubatch: int) -> None:
    assert fed(memory_of(kind, max_ubatch), A, PAST).tolist() == expected(PAST).tolist()


@kinds
@pytest.mark.parametrize("pieces", [(1,) * 17, (3, 1, 9, 4), (16, 1), (1, 16)], ids=str)
def test_a_prompt_may_come_in_pieces(kind: str, pieces: tuple[int, ...]) -> None:
    memory, at, rows = memory_of(kind, 5), 0, []
    for count in pieces:
        rows += fed(memory, A, PAST[at : at + count]).tolist()
        at += count
    assert rows == expected(PAST).tolist()


@kinds
@pytest.mark.parametrize("max_ubatch", [1, 3, 32])
def test_sequences_do_not_see_each_others_tokens(kind: str, max_ubatch: int) -> None:
    memory = memory_of(kind, max_ubatch)
    fed(memory, B, [7, 8])
    parts = ((A, PAST[:9]), (B, [9, 10, 11]), (C, [5]))
    batch = interleaved(next_batch(memory, *parts), seed=2)
    rows = previous(memory, batch)
    for (seq, tokens), before in zip(parts, ([], [7, 8], []), strict=True):
        wanted = expected([*before, *tokens], len(before))
        assert rows[batch.seqs == seq].tolist() == wanted.tolist()


@kinds
@pytest.mark.parametrize("length", range(6))
def test_shared_and_restored_pasts_are_pasts(kind: str, length: int) -> None:
    memory = memory_of(kind)
    if length:
        fed(memory, A, PAST[:length])
    memory.copy(A, B)
    wanted = expected([*PAST[:length], 1, 2, 3], length).tolist()
    assert fed(memory, B, [1, 2, 3]).tolist() == wanted
    assert fed(memory, A, [4]).tolist() == expected([*PAST[:length], 4], length).tolist()
    memory.remove(C, 0, None)
    other = memory_of(kind)
    fed(other, A, [50] * 9)
    fresh = memory_of(kind)
    if length:
        fed(fresh, A, PAST[:length])
    other.restore(C, tuple(PAST[:length]), *fresh.snapshot(A))
    assert fed(other, C, [1, 2, 3]).tolist() == wanted


@pytest.mark.parametrize("kind", ["kv", "iswa"])
def test_a_cut_sequence_has_the_past_that_is_left(kind: str) -> None:
    memory = memory_of(kind)
    fed(memory, A, PAST)
    memory.remove(A, 15, None)
    assert fed(memory, A, [1, 2]).tolist() == expected([*PAST[:15], 1, 2], 15).tolist()


@kinds
def test_what_was_rolled_back_is_nobodys_past(kind: str) -> None:
    memory_spec = member_spec(kind, max_ubatch=3)
    memory = tiny_memory(memory_spec)
    fed(memory, A, PAST[:5])
    plan = memory.plan(next_batch(memory, (A, [60, 61, 62, 63]), (B, [70, 71])))
    for index, ubatch in enumerate(plan.ubatches):
        compute(memory_spec, ubatch, plan.apply(index))
    plan.rollback()
    assert fed(memory, A, [1, 2]).tolist() == expected([*PAST[:5], 1, 2], 5).tolist()
    assert fed(memory, B, [3]).tolist() == expected([3]).tolist()


@kinds
def test_tokens_without_an_id_are_null(kind: str) -> None:
    memory = memory_of(kind, 2)
    tokens = [5, NULL_TOKEN, NULL_TOKEN, 6, 7]
    assert fed(memory, A, tokens).tolist() == expected(tokens).tolist()
    assert memory.tokens_at(A, 0, 5) == tuple(tokens)
    memory.restore(B, tuple(tokens), *memory.snapshot(A))
    assert fed(memory, B, [8]).tolist() == [[NULL_TOKEN, NULL_TOKEN, 6, 7]]


def test_moved_tokens_are_at_their_new_places() -> None:
    memory = memory_of("kv")
    fed(memory, A, PAST)
    memory.remove(A, 14, 16)
    assert fed(memory, A, [1]).tolist() == [[PAST[13], NULL_TOKEN, NULL_TOKEN, PAST[16]]]
    memory.shift(A, 16, None, -2)
    assert fed(memory, A, [2]).tolist() == [[PAST[12], PAST[13], PAST[16], 1]]


def test_any_number_of_tokens_can_be_asked_for() -> None:
    memory = memory_of("kv")
    fed(memory, A, PAST)
    plan = memory.plan(next_batch(memory, (A, [1, 2])))
    view = plan.apply(0)
    assert view.previous_tokens(1).tolist() == [[PAST[-1]], [1]]
    assert view.previous_tokens(20)[1].tolist() == [NULL_TOKEN, NULL_TOKEN, *PAST, 1]
    plan.rollback()
