"""What came of guesses, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.runner import Engine


def told_drafting(engine: Engine) -> str | None:
    """One line; None without a drafter."""
    drafter, figures = engine.drafter, engine.figures
    if drafter is None or figures is None:
        return None
    told = f"drafting by {drafter.name}: {figures.accepted:,} of {figures.drafted:,} guesses were right"
    if figures.steps:
        told += f", {figures.tokens_per_step:.1f} tokens a step"
    if figures.replayed:
        told += f"; {figures.replayed:,} tokens were read again after wrong ones"
    if engine.draft_failure is not None:
        told += f"; it failed, and guesses no more: {engine.draft_failure}"
    return told


def drafting_data(engine: Engine) -> dict[str, Any] | None:
    """None without a drafter."""
    drafter, figures = engine.drafter, engine.figures
    if drafter is None or figures is None:
        return None
    return {
        "drafter": drafter.name,
        "steps": figures.steps,
        "drafted": figures.drafted,
        "accepted": figures.accepted,
        "replayed": figures.replayed,
        "failure": None if engine.draft_failure is None else str(engine.draft_failure),
    }
