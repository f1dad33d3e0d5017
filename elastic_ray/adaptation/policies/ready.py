"""Base class of ready-made policies, with argument checks (pure)."""

from __future__ import annotations

from elastic_ray.adaptation.policy import Policy
from placement.checks import check_choice, check_number, check_whole


class ReadyPolicy(Policy):
    """Base class of ready-made policies, which checks their settings."""

    deadline_s = 2.0

    def _number(self, name: str, value: float, **bounds: float) -> float:
        """Check that an argument is a finite number within ``bounds`` (:func:`check_number`), and return it."""
        check_number(f"{type(self).__name__}({name})", value, finite=True, **bounds)  # type: ignore[arg-type]
        return float(value)

    def _whole(self, name: str, value: int, *, least: int) -> int:
        """Check that an argument is a whole number of at least ``least``, and return it."""
        check_whole(f"{type(self).__name__}({name})", value, least=least)
        return int(value)

    def _one_of(self, name: str, value: str, known: tuple[str, ...]) -> str:
        """Check that an argument is one of the ``known`` names, and return it."""
        check_choice(f"{type(self).__name__}({name})", value, known)
        return value
