"""What the best of several replies was chosen from, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cli.options import EngineOptions, SamplingOptions
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.best_of import BestOf


def check_best_of(options: EngineOptions, sampling: SamplingOptions) -> None:
    """Before a model is loaded. Raises UsageError where --best-of would have nothing to choose from, or would
    leave out what else was asked for."""
    if sampling.for_new()["temperature"] == 0:
        raise UsageError("--best-of chooses among replies that differ, and at --temp 0 they are all the same")
    if options.draft is not None:
        raise UsageError("--best-of looks at the logits of every token, and cannot go with --draft")


def told_best_of(found: BestOf) -> str:
    """One line."""
    means = (candidate.mean_logprob for candidate in found.candidates)
    each = ", ".join("none" if mean is None else f"{mean:.3f}" for mean in means)
    return f"reply {found.chosen + 1} of {len(found.candidates)}; mean log-probability of a token: {each}"


def best_of_data(found: BestOf) -> dict[str, Any]:
    return {
        "chosen": found.chosen,
        "candidates": [
            {
                "seed": candidate.seed,
                "tokens": candidate.num_tokens,
                "finish": candidate.pieces[-1].finish,
                "mean_logprob": candidate.mean_logprob,
            }
            for candidate in found.candidates
        ],
    }
