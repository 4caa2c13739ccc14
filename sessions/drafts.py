"""What becomes of a stored draft when its session goes on in an engine: restored, rebuilt, or left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.errors import TenutoError
from engine.state import Run, SeqId, SequenceState
from engine.verbs import Verbs
from serialization.manifest import Manifest

#: the draft came back, too
RESTORED = "restored"


def usable(engine: Verbs, manifest: Manifest) -> Manifest:
    """The manifest without a draft that is of no use to this engine: its blobs are not even read."""
    draft = manifest.draft
    if draft is None or engine.draft_refusal(draft.fingerprint) is None:
        return manifest
    return replace(manifest, draft=None)


def land(engine: Verbs, state: SequenceState, runs: Sequence[Run] | None = None) -> tuple[SeqId, str | None]:
    """A live sequence of `state`, and why its draft is not there. One that the drafter has no room for does
    not keep the target from going on. `runs` as in `Engine.restore`, and raises as it does, of the target."""
    try:
        return engine.restore(state, runs), None
    except TenutoError as error:
        if state.draft is None:
            raise
        return engine.restore(replace(state, draft=None), runs), str(error)


def told(engine: Verbs, manifest: Manifest, lost: str | None) -> str | None:
    """For people: `restored`, `rebuilt: <why>` where the engine's drafter begins anew, `unused: <why>` where
    it has none that keeps anything; None where nothing is missed. `lost` says what kept a draft that would be
    of use from coming back."""
    draft = manifest.draft
    why = engine.draft_refusal(None if draft is None else draft.fingerprint)
    if draft is None and why is None:
        return None
    why = why or lost
    if why is None:
        return RESTORED
    drafter = engine.drafter
    keeps = drafter is not None and drafter.fingerprint is not None
    return f"{'rebuilt' if keeps else 'unused'}: {why}"
