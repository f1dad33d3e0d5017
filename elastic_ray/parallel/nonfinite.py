"""Errors for non-finite gradients and parameters, and the user's choices of how to handle them (pure)."""

from __future__ import annotations

from collections.abc import Sequence

NONFINITE = ("warn", "skip", "raise", "ignore")


class NonFiniteGradientsError(FloatingPointError):
    """Error raised with ``nonfinite="raise"`` if gradients about to be applied are NaN or infinite."""


class NonFiniteParametersError(FloatingPointError):
    """Error raised if the train function returns with NaN or infinite parameters; the job then fails."""


def check_choice(nonfinite: object) -> str:
    """Return the user's choice for non-finite gradients after checking it.

    Raises ValueError if the choice is not one of ``NONFINITE``.
    """
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {', '.join(NONFINITE)}, but got {nonfinite!r}")
    return str(nonfinite)


def describe_gradients(model: int, step: int, ranks: Sequence[int], nonfinite: str) -> str:
    """Return a message about non-finite gradients of model number ``model`` on ``ranks`` (may be empty) at ``step``."""
    where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    done = {"skip": "the update was left out", "raise": "training ends"}.get(nonfinite, "they were applied")
    return f"gradients of model {model} were NaN or infinite{where} in step {step}; {done}"
