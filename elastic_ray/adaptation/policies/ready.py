"""Base class of ready-made policies, with argument checks (pure)."""

from __future__ import annotations

import math

from elastic_ray.adaptation.policy import Policy


class ReadyPolicy(Policy):
    """Base class of ready-made policies, which checks their settings."""

    deadline_s = 2.0

    def _number(
        self,
        name: str,
        value: object,
        *,
        least: float = -math.inf,
        above: float = -math.inf,
        most: float = math.inf,
        below: float = math.inf,
    ) -> float:
        """Check that an argument is a finite number within bounds, and return it."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{type(self).__name__}({name}) must be a number, but got {value!r}")
        if math.isfinite(value) and value >= least and value > above and value <= most and value < below:
            return float(value)
        bounds = [
            f"{said} {bound:g}"
            for said, bound in (("at least", least), ("above", above), ("at most", most), ("below", below))
            if math.isfinite(bound)
        ]
        said = " and ".join(bounds) or "finite"
        raise ValueError(f"{type(self).__name__}({name}) must be {said}, but got {value}")

    def _whole(self, name: str, value: object, *, least: int) -> int:
        """Check that a setting is an integer of at least `least`, and return it."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{type(self).__name__}({name}) must be a whole number, but got {value!r}")
        return int(self._number(name, value, least=least))

    def _one_of(self, name: str, value: object, known: tuple[str, ...]) -> str:
        """Check that a setting is one of the `known` names, and return it."""
        if value not in known:
            raise ValueError(f"{type(self).__name__}({name}) must be one of {', '.join(known)}, but got {value!r}")
        return str(value)
