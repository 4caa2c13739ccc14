"""A conversation of another system as a session, once its model is known to be the one that was named.

The rows of the file are put in our order and dtypes, and proven: the model computes the last of them again
(`proof.py`). Then they are one session more, whose rows belong to it alone. Where there are no rows that
could be taken, the model reads the token ids of the file anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from engine.errors import Corrupt, Unproven, Unsupported, UsageError
from engine.sequence import CANARY_LOGITS
from engine.state import (
    Canary,
    Edge,
    NextLogits,
    PartKind,
    Pending,
    Provenance,
    SamplerParams,
    SeqId,
    SequenceState,
    Span,
    parts_of,
)
from engine.verbs import Verbs
from serialization.brought import Brought, Proven
from serialization.foreign.conversion import Change, Conversion, Fate
from serialization.foreign.convert import Converted, to_rows
from serialization.foreign.foreign_state import ForeignState, Rotation, ValueOrder
from serialization.foreign.geometry import Geometry
from serialization.foreign.target import may_be_rotated
from serialization.limits import MAX_LABEL_NBYTES
from serialization.manifest import Message
from sessions.manager import SessionManager
from sessions.migrate.geometry import geometry_of, own_geometry_of, target_of
from sessions.migrate.proof import Proof, let_go, provable, prove
from sessions.migrate.spoken import messages_of
from sessions.session import SessionInfo
from sessions.transcript import whole_characters
from sessions.turns import TEXT, title_of_all


class Taking(StrEnum):
    """What is done with the rows of a file."""

    PROVEN = "proven"  # taken where the model computes the last of them again; else refused
    TRUSTED = "trusted"  # taken as they are; the session says that nobody verified them
    REREAD = "reread"  # left where they are: the model reads the token ids anew


@dataclass(frozen=True, slots=True)
class Wish:
    """What the person who imports says of it. `tokens` are the ids, in place of those that the file lists:
    of its rows, and perhaps of what follows. `rotation` says whether quantized rows are Hadamard-rotated,
    where the file does not; both are tried where nobody does. `messages` say what was said; where
    nobody says it, the chat template tells it (`spoken.py`)."""

    name: str | None = None
    title: str = ""
    tokens: tuple[int, ...] | None = None
    rotation: Rotation | None = None
    taking: Taking = Taking.PROVEN
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True, slots=True)
class Examined:
    """What an import would do, and nothing done yet. `rows` are those that would be taken, None where the
    model would read all `tokens`. `proof` is there where one was asked for. `conversion` says what becomes of
    what is in the file. `rotation` is the one that was found. `logits` follow the rows, where they could be
    computed. `messages` are those of a chat, or one that is the whole text (`turns.TEXT`)."""

    tokens: tuple[int, ...]
    rows: Converted | None
    proof: Proof | None
    rotation: Rotation
    brought: Brought
    conversion: Conversion
    logits: torch.Tensor | None = None
    messages: tuple[Message, ...] = ()

    @property
    def num_read(self) -> int:
        """How many tokens the model would have to read."""
        return len(self.tokens) - (0 if self.rows is None else self.rows.length)


@dataclass(frozen=True, slots=True)
class Imported:
    session: SessionInfo
    examined: Examined


Progress = Callable[[int, int], None]


def import_foreign(
    manager: SessionManager, state: ForeignState, wish: Wish, progress: Progress | None = None
) -> Imported:
    """A new session from `state`, by the model of the manager's engine. `progress(done, total)` counts
    tokens that are read. It is there whole, or not at all. Raises as `examine`, and as
    `SessionManager.create` and `save`."""
    return take_in(manager, examine(manager.engine, state, wish), wish, progress)


def examine(engine: Verbs, state: ForeignState, wish: Wish) -> Examined:
    """What of `state` can be taken, proven by the engine where it is to be; nothing stays there.

    Raises UsageError where token ids are missing, Unproven where the model computes other rows, Corrupt,
    FingerprintMismatch and Unsupported where the rows are no conversation of this model, ContextFull, NoSlot.
    """
    examined = _examined(engine, state, wish, _tokens(engine, state, wish))
    if wish.messages is not None:
        return replace(examined, messages=wish.messages)
    ids = examined.tokens
    text = Message(TEXT, whole_characters(engine.tokenizer.decode(ids)), 0, len(ids))
    return replace(examined, messages=messages_of(engine, ids) or (text,))


def take_in(
    manager: SessionManager, examined: Examined, wish: Wish, progress: Progress | None = None
) -> Imported:
    """The session of what was examined. Raises as `SessionManager.create` and `save`, ContextFull, NoSlot."""
    engine = manager.engine
    session = manager.create(wish.name, wish.title or title_of_all(examined.messages))
    try:
        session.brought = examined.brought
        seq = _live(engine, examined, progress)
        try:
            manager.save(session, seq, examined.messages)
        finally:
            let_go(engine, seq)
    finally:
        session.close()
    return Imported(manager.brief(session.id), examined)


def row_types(state: ForeignState) -> dict[str, str]:
    """The settings with which an engine keeps the rows of `state` without a loss: `type_k`, `type_v`."""
    names = {"k": "type_k", "v": "type_v"}
    return {
        names[rows.tensor]: rows.dtype
        for cells in state.caches
        for rows in cells.rows
        if rows.tensor in names
    }


# --- what can be taken ------------------------------------------------------------------------------


def _examined(engine: Verbs, state: ForeignState, wish: Wish, tokens: tuple[int, ...]) -> Examined:
    if wish.taking is Taking.REREAD or not state.length:
        return _reread(state, tokens, "it was asked so" if state.length else "there are none")
    try:
        found = _candidates(engine, state, wish.rotation)
    except Unsupported as error:
        return _reread(state, tokens, str(error))
    if parts_of(engine.remembered.layout, PartKind.POINT):
        (_, rows), *_ = found
        if wish.taking is Taking.TRUSTED and rows.points and len(tokens) > rows.length:
            return _trusted(state, tokens, *found[0], None)
        return _reread(state, tokens, "recurrent state cannot go back a token, so nothing could prove it")
    if wish.taking is Taking.TRUSTED:
        return _trusted(state, tokens, *found[0], _asked(engine, state, found[0][1], tokens))
    if not provable(engine, found[0][1]):
        return _reread(
            state, tokens, "it has fewer window rows than its last token sees: nothing could prove it"
        )
    return _proven(engine, state, tokens, found)


def _tokens(engine: Verbs, state: ForeignState, wish: Wish) -> tuple[int, ...]:
    tokens = state.tokens if wish.tokens is None else wish.tokens
    if tokens is None:
        raise UsageError(f"{state.source} has no token ids, and a conversation is its ids: name them")
    if len(tokens) < state.length:
        raise UsageError(f"{len(tokens):,} token ids for rows of {state.length:,} tokens: name those of all")
    if not tokens:
        raise UsageError(f"{state.source} has neither tokens nor rows")
    vocab = engine.remembered.vocab_size
    if not 0 <= min(tokens) <= max(tokens) < vocab:
        raise Corrupt(f"a token id is outside of the model's vocabulary of {vocab:,}")
    return tuple(tokens)


def _geometry(engine: Verbs, state: ForeignState) -> Geometry:
    return own_geometry_of(engine) if state.order is ValueOrder.OURS else geometry_of(engine)


def _candidates(
    engine: Verbs, state: ForeignState, said: Rotation | None
) -> list[tuple[Rotation, Converted]]:
    """The rows by every rotation that may be."""
    geometry, target = _geometry(engine, state), target_of(engine)
    rotation = state.rotation if said is None else said
    if not may_be_rotated(state, geometry):
        rotations = [Rotation.NONE]
    elif rotation is Rotation.UNKNOWN:
        rotations = [Rotation.ROTATED, Rotation.NONE]
    else:
        rotations = [rotation]
    found = []
    for each in rotations:
        rows = to_rows(state, geometry, target, each)
        if not rows.conversion.loss < 1:
            raise Unsupported("its rows have values that the dtype of the cache cannot say")
        found.append((each, rows))
    return found


def _proven(
    engine: Verbs, state: ForeignState, tokens: tuple[int, ...], found: list[tuple[Rotation, Converted]]
) -> Examined:
    """Raises Unproven of the candidate that came nearest."""
    geometry, target = _geometry(engine, state), target_of(engine)
    proofs = [(prove(engine, geometry, target, rows, tokens), rotation, rows) for rotation, rows in found]
    proof, rotation, rows = min(proofs, key=lambda each: each[0].worst.apart)
    proof.require(engine.model_name)
    brought = Brought(_label(state), Proven.ROWS, rows.conversion.loss, proof.worst.drift)
    return Examined(tokens, rows, proof, rotation, brought, rows.conversion, _numbers(proof.logits))


def _asked(
    engine: Verbs, state: ForeignState, rows: Converted, tokens: tuple[int, ...]
) -> torch.Tensor | None:
    """What follows the rows, computed from them. None where they are too few for it, and it has to be
    given."""
    try:
        return _numbers(prove(engine, _geometry(engine, state), target_of(engine), rows, tokens).logits)
    except Unproven:
        if len(tokens) == rows.length:
            raise
        return None


def _numbers(logits: torch.Tensor) -> torch.Tensor:
    """`logits`. Raises Corrupt where they are none: older rows may be damaged in ways that leave no mark on
    the last ones."""
    if not bool(torch.isfinite(logits).all()):
        raise Corrupt("with these rows the model computes no numbers: some of them are damaged")
    return logits


def _trusted(
    state: ForeignState,
    tokens: tuple[int, ...],
    rotation: Rotation,
    rows: Converted,
    logits: torch.Tensor | None,
) -> Examined:
    brought = Brought(_label(state), Proven.UNVERIFIED, rows.conversion.loss)
    return Examined(tokens, rows, None, rotation, brought, rows.conversion, logits)


def _reread(state: ForeignState, tokens: tuple[int, ...], why: str) -> Examined:
    changes = (
        Change(Fate.KEPT, f"{len(tokens):,} token ids, which the model reads anew"),
        Change(Fate.DROPPED, "all rows", why),
    )
    brought = Brought(_label(state), Proven.REREAD)
    return Examined(tokens, None, None, Rotation.NONE, brought, Conversion(changes))


def _label(state: ForeignState) -> str:
    return state.source.encode()[:MAX_LABEL_NBYTES].decode(errors="ignore")


# --- the session ------------------------------------------------------------------------------------


def _live(engine: Verbs, examined: Examined, progress: Progress | None) -> SeqId:
    """A sequence with all that was examined."""
    rows, tokens = examined.rows, examined.tokens
    length = 0 if rows is None else rows.length
    seq = engine.create() if rows is None or not length else engine.restore(_state(engine, examined, rows))
    try:
        if rest := tokens[length:]:
            engine.feed(seq, rest, progress=progress)
    except BaseException:
        let_go(engine, seq)
        raise
    return seq


def _state(engine: Verbs, examined: Examined, rows: Converted) -> SequenceState:
    tokens, length = examined.tokens, rows.length
    edge: Edge = Pending(tokens[length]) if len(tokens) > length else None
    canary = None
    logits = examined.logits
    if logits is not None:
        canary = _canary(length, logits)
        if edge is None:
            edge = NextLogits(logits)
    return SequenceState(
        layout=engine.remembered.layout,
        fingerprint=engine.fingerprint,
        tokens=tokens[:length],
        rows=rows.rows,
        points=rows.points,
        spans=(Span(0, length, Provenance.IMPORTED),),
        edge=edge,
        sampler=SamplerParams(),
        canary=canary,
    )


def _canary(length: int, logits: torch.Tensor) -> Canary:
    top = torch.topk(logits, min(CANARY_LOGITS, logits.numel()))
    return Canary(length - 1, tuple(top.indices.tolist()), tuple(top.values.tolist()))
