"""Gradients and parameters that are NaN or infinite: the errors, and what a job does about them (pure)."""

from __future__ import annotations

from collections.abc import Sequence

NONFINITE = ("warn", "skip", "raise", "ignore")


class NonFiniteGradientsError(FloatingPointError):
    """Gradients that the optimizer was to apply are NaN or infinite, and ``nonfinite="raise"``."""


class NonFiniteParametersError(FloatingPointError):
    """The train function has returned with parameters that are NaN or infinite: such a job is no success."""


def check_choice(nonfinite: object) -> str:
    """Check the user's choice for non-finite gradients and return it.

    Raises:
        ValueError: it is none of ``NONFINITE``.
    """
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {', '.join(NONFINITE)}, but got {nonfinite!r}")
    return str(nonfinite)


def describe_gradients(model: int, step: int, ranks: Sequence[int], nonfinite: str) -> str:
    """A sentence for people; ``ranks`` where they came from, empty where nobody knows."""
    where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    done = {"skip": "the update was left out", "raise": "training ends"}.get(nonfinite, "they were applied")
    return f"gradients of model {model} were NaN or infinite{where} in step {step}; {done}"
