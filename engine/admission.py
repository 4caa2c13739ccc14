"""What an engine takes in: states of its own meaning, whole, and tokens that its context has room for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import ResolvedConfig
from engine.errors import BatchRefused, ContextFull, FingerprintMismatch, StateError
from engine.state import Fingerprint, Layout, NextLogits, Pending, SequenceState


def check_state(
    state: SequenceState, fingerprint: Fingerprint, layout: Layout, vocab_size: int, n_ctx: int
) -> None:
    """Raises FingerprintMismatch (naming the field), StateError, ContextFull. Rows are checked by memory."""
    for field, theirs, mine in state.fingerprint.differing(fingerprint):
        raise FingerprintMismatch(
            f"the state was made with {field} = {theirs}, this engine has {mine}", field=field
        )
    if state.layout != layout:
        raise FingerprintMismatch("the state's cache layout is another", field="layout")
    ids = (*state.tokens, state.edge.token) if isinstance(state.edge, Pending) else state.tokens
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise StateError(f"the state has a token id outside of the vocabulary of {vocab_size:,}")
    if state.tokens and state.edge is None:
        raise StateError("the state does not say what follows its tokens")
    if isinstance(state.edge, NextLogits):
        _check_logits(state.edge.logits, vocab_size)
    _check_spans(state)
    if state.length > n_ctx:
        raise ContextFull(f"the state has {state.length:,} tokens, the context only {n_ctx:,}")


def _check_logits(logits: torch.Tensor, vocab_size: int) -> None:
    if logits.shape != (vocab_size,) or logits.dtype != torch.float32:
        raise StateError(
            f"the state's logits are {logits.dtype} {list(logits.shape)}, not float32 [{vocab_size}]"
        )


def _check_spans(state: SequenceState) -> None:
    at = 0
    for span in state.spans:
        if span.start != at or span.stop <= at:
            raise StateError(f"the state does not say how its rows from {at:,} on came to be")
        at = span.stop
    if at != state.length:
        raise StateError(f"the state says how {at:,} rows came to be, and has {state.length:,} tokens")


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises BatchRefused for an id that the model has no embedding of."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise BatchRefused(f"a token id is outside of the vocabulary of {vocab_size:,}")


def check_room(config: ResolvedConfig, refuse_shift: str | None, length: int, count: int) -> None:
    """Raises ContextFull if `count` tokens more than the `length` there are can never fit. A context that is
    full can be shifted by choice, unless `refuse_shift` says why not."""
    full = config.n_ctx
    if length + count <= full:
        return
    if config.overflow == "shift" and count <= full - config.n_keep - 1:
        if refuse_shift is None:
            return
        raise ContextFull(f"the context of {full:,} tokens is full, and cannot be shifted: {refuse_shift}")
    raise ContextFull(
        f"the context of {full:,} tokens is full: {length:,} are used, and {count:,} more do not fit",
        length=length,
        count=count,
        n_ctx=full,
    )
