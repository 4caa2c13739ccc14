"""From a manifest to a live sequence, with the truth about what was reused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from engine.errors import (
    BlobMissing,
    Corrupt,
    EditRefused,
    FingerprintMismatch,
    StateError,
    StoreError,
    TenutoError,
)
from engine.state import Pending, Provenance, SamplerParams, SeqId, SequenceState
from engine.verbs import Verbs
from serialization.blobs import Store
from serialization.brought import Proven
from serialization.losses import Loss
from serialization.manifest import Manifest
from serialization.resume import common_prefix, last_resumable
from serialization.snapshot import arriving_state, read_state
from sessions.drafts import land, told, usable
from sessions.policy import Policy
from sessions.reduce import has_rows


class Reason(StrEnum):
    """Why so much was reused, and not more."""

    EXACT = "exact"  # every row came back, on the same build and kind of device
    COMPATIBLE = "compatible"  # every row came back, another build made it, the canary agreed
    PREFIX = "prefix"  # rows of an equal past were shared
    NEW = "new"  # there was nothing to reuse
    EXPIRED = "expired"  # the rows were given up by age or budget; the token ids were read again
    NO_CHECKPOINT = "no-checkpoint"  # the model's memory cannot go on from there; the rest was read again
    TEMPLATE_DIVERGED = "template-diverged"  # the chat template no longer renders the same past
    EDITED = "edited"  # the conversation was cut back by its owner
    FINGERPRINT = "fingerprint"  # made by another model or configuration; read again
    CORRUPT = "corrupt"  # stored bytes were damaged; read again
    MISSING = "missing"  # stored bytes were gone; read again
    REPEATED = "repeated"  # the turn was said before: its stored reply is told again
    SLOWER = "slower-than-recompute"  # reading the rows would have taken longer than reading the tokens


class Fallback(StrEnum):
    """What to do when stored rows cannot be believed."""

    REFUSE = "refuse"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """`restored` tokens came from storage or memory, `recomputed` were read again, in `seconds`.

    `draft` says what became of the drafter's state (see `drafts.told`); what came back of it is of the first
    `draft_restored` tokens.
    """

    reason: Reason
    restored: int
    recomputed: int
    seconds: float
    detail: str = ""
    draft: str | None = None
    draft_restored: int = 0


def restore(
    engine: Verbs, store: Store, manifest: Manifest, policy: Policy, fallback: Fallback = Fallback.REFUSE
) -> tuple[SeqId, RestoreResult]:
    """A live sequence with all that `manifest` says, or an error and nothing left behind.

    Rows that were given up by age are read again without asking. What is damaged, missing or made by
    another model raises Corrupt, BlobMissing or FingerprintMismatch, unless `fallback` says to
    recompute from the token ids.
    """
    started = time.perf_counter()
    try:
        came = _come_back(engine, store, manifest, policy, fallback)
    except (FingerprintMismatch, Corrupt, BlobMissing) as error:
        reason, expired = _reason(error), _expired(store, error)
        if fallback is Fallback.REFUSE and not expired:
            raise
        reason, detail = (Reason.EXPIRED, "") if expired else (reason, str(error))
        draft = told(engine, manifest, "the tokens are read again")
        came = _Came(engine.create(manifest.sampler), reason, 0, detail, draft)
    seq, restored, detail = came.seq, came.restored, came.detail
    if restored and manifest.reencoded:
        detail = "; ".join(filter(None, (detail, _told_losses(manifest.reencoded))))
    if not _same_words(engine, manifest):  # its ids mean other text here: the text is rendered anew
        detail += "; its text is tokenized and read anew with the next turn"
        return seq, RestoreResult(came.reason, 0, 0, time.perf_counter() - started, detail, came.draft)
    try:
        _read_rest(engine, seq, manifest, restored)
    except BaseException:
        engine.close(seq)
        raise
    if restored and (unverified := _unverified(manifest)):
        detail = f"{detail}, {unverified}" if detail else unverified
    recomputed = len(manifest.tokens) - restored
    seconds = time.perf_counter() - started
    return seq, RestoreResult(
        came.reason, restored, recomputed, seconds, detail, came.draft, came.draft_restored
    )


@dataclass(frozen=True, slots=True)
class _Came:
    """A live sequence that came from stored rows, and the truth about it."""

    seq: SeqId
    reason: Reason
    restored: int
    detail: str
    draft: str | None
    draft_restored: int = 0


def _come_back(engine: Verbs, store: Store, manifest: Manifest, policy: Policy, fallback: Fallback) -> _Came:
    """From the stored rows. What is wrong with the draft alone is an error, too. But who would rather
    recompute than be refused need not do so for that, nor where rows had their time."""
    try:
        return _from_rows(engine, store, manifest, policy)
    except (Corrupt, BlobMissing) as error:
        read = usable(engine, manifest).draft is not None
        if not read or (fallback is Fallback.REFUSE and not _expired(store, error)):
            raise
        came = _from_rows(engine, store, replace(manifest, draft=None), policy)
        return replace(came, draft=told(engine, manifest, str(error)))


def seed(
    engine: Verbs, store: Store, manifest: Manifest | None, tokens: Sequence[int], sampler: SamplerParams
) -> tuple[SeqId, int, int]:
    """A live sequence with the first n of `tokens` from stored rows, n (0 where nothing can be had), and of
    how many of them the draft came along. Rows of another build are not taken: only a whole state has a
    canary to believe them by."""
    length = stored_prefix(engine, manifest, tokens)
    state = readable(engine, store, manifest, length) if length and manifest is not None else None
    if state is None:
        return engine.create(sampler), 0, 0
    seq, lost = land(engine, replace(state, sampler=sampler))
    return seq, length, 0 if state.draft is None or lost else state.draft.reach


def readable(engine: Verbs, store: Store, manifest: Manifest, length: int) -> SequenceState | None:
    """The first `length` tokens of a stored state, with a draft that is of use and can be read. None where
    the target cannot: the ids are at hand, so the caller reads them again, and says so."""
    wanted = usable(engine, manifest)
    try:
        return read_state(store, wanted, length)
    except (StateError, StoreError):
        if wanted.draft is None:
            return None
        return readable(engine, store, replace(manifest, draft=None), length)


def stored_prefix(engine: Verbs, manifest: Manifest | None, tokens: Sequence[int]) -> int:
    """How many of `tokens` the rows of `manifest` could give this very engine."""
    if manifest is None or manifest.fingerprint != engine.fingerprint:
        return 0
    return last_resumable(manifest, common_prefix(manifest.tokens, tokens))


def refuse_other_model(engine: Verbs, manifest: Manifest) -> None:
    """Raises FingerprintMismatch, naming the fields, unless `manifest` means the same here."""
    differing = list(manifest.fingerprint.differing(engine.fingerprint))
    if differing:
        field, theirs, mine = differing[0]
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise FingerprintMismatch(
            f"session {manifest.session} was made with {field} = {theirs}, this engine has {mine}{more}",
            fields=[name for name, _, _ in differing],
        )


def _from_rows(engine: Verbs, store: Store, manifest: Manifest, policy: Policy) -> _Came:
    if not manifest.tokens:
        return _Came(engine.create(manifest.sampler), Reason.NEW, 0, "", None)
    refuse_other_model(engine, manifest)
    again = told(engine, manifest, "the tokens are read again")
    if not has_rows(manifest):
        detail = "its rows were given up by age or budget"
        return _Came(engine.create(manifest.sampler), Reason.EXPIRED, 0, detail, again)
    length = last_resumable(manifest, len(manifest.tokens))
    if length == 0:
        return _Came(engine.create(manifest.sampler), Reason.NO_CHECKPOINT, 0, "", again)
    same_build = dict(manifest.fingerprint.making) == dict(engine.fingerprint.making)
    # A canary is computed from the checkpoint before the last.
    wanted, num_points = usable(engine, manifest), 1 if same_build else 2
    with arriving_state(store, wanted, length, num_points=num_points) as (state, runs):
        seq, lost = land(engine, state, runs)
    if state.draft is None:
        lost = "its memory cannot go on from there"
    draft = told(engine, manifest, lost)
    draft_restored = 0 if state.draft is None or lost else state.draft.reach
    if same_build:
        if length == len(manifest.tokens):
            return _Came(seq, Reason.EXACT, length, "", draft, draft_restored)
        detail = f"its memory can go on from {length:,} tokens"
        return _Came(seq, Reason.NO_CHECKPOINT, length, detail, draft, draft_restored)
    try:
        detail = _canary(engine, seq, state, policy)  # which a piece of a state has not
    except BaseException:
        engine.rewind(seq, 0)  # closed with its rows it would be a prefix that the ids are read by
        engine.close(seq)
        raise
    return _Came(seq, Reason.COMPATIBLE, length, detail, draft, draft_restored)


def _canary(engine: Verbs, seq: SeqId, state: SequenceState, policy: Policy) -> str:
    """One token is computed again and compared with its stored logits before another build's rows
    are believed."""
    changed = sorted(
        name
        for name in {*state.fingerprint.making, *engine.fingerprint.making}
        if state.fingerprint.making.get(name) != engine.fingerprint.making.get(name)
    )
    if state.canary is None:
        raise FingerprintMismatch(
            f"the state was made with another {', '.join(changed)} and has no canary to check it by"
        )
    try:
        drift = engine.canary_drift(seq, state.canary)
    except EditRefused as error:
        raise FingerprintMismatch(
            f"the state was made with another {', '.join(changed)}, and its canary cannot be asked: {error}"
        ) from error
    if not drift <= policy.drift:
        raise FingerprintMismatch(
            f"the state was made with another {', '.join(changed)}; its canary logits are off by {drift:.2f}",
            drift=drift,
        )
    return f"made with another {', '.join(changed)}; canary logits within {drift:.2g}"


def _read_rest(engine: Verbs, seq: SeqId, manifest: Manifest, restored: int) -> None:
    """Feed the ids that have no rows, and put the pending one back."""
    rest = manifest.tokens[restored:]
    if rest:
        engine.feed(seq, rest)
        engine.set_sampler(seq, manifest.sampler)
        if isinstance(manifest.edge, Pending):
            engine.set_pending(seq, manifest.edge.token)


def _told_losses(losses: Sequence[Loss]) -> str:
    """What conversions the rows have been through, for people."""
    told = []
    for loss in losses:
        pairs = sorted({(part.before, part.after) for part in loss.parts})
        words = ", ".join(f"{before} to {after}" for before, after in pairs)
        told.append(f"{words}{' exactly' if loss.is_exact else ''}")
    return f"its rows were re-encoded, {', then '.join(told)}"


def _unverified(manifest: Manifest) -> str:
    """That rows of another system were taken on trust; empty where none were, or are any more."""
    brought = manifest.brought
    there = any(span.provenance is Provenance.IMPORTED for span in manifest.spans)
    if brought is None or brought.proven is not Proven.UNVERIFIED or not there:
        return ""
    return f"nobody verified the rows of {brought.source}"


def _same_words(engine: Verbs, manifest: Manifest) -> bool:
    return manifest.fingerprint.meaning.get("tokenizer") == engine.fingerprint.meaning.get("tokenizer")


def _expired(store: Store, error: TenutoError) -> bool:
    """Whether what is missing had its time."""
    return isinstance(error, BlobMissing) and store.rows_expire


def _reason(error: TenutoError) -> Reason:
    match error:
        case FingerprintMismatch():
            return Reason.FINGERPRINT
        case BlobMissing():
            return Reason.MISSING
        case StateError():
            return Reason.CORRUPT
    raise error
