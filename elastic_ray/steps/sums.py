"""What accumulators were given in steps that are not committed yet (pure)."""

from __future__ import annotations

from collections.abc import Mapping


class StepSums:
    """Sums of this rank alone, by the depth of the step that they belong to (a nested pass has its own)."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[tuple[int, int], dict[str, float]]] = {}
        self._made: dict[int, int] = {}

    def new_key(self, scope: int) -> tuple[int, int]:
        """Key of a newly made accumulator: its scope (an epoch, -1 outside epochs) and its number there."""
        self._made[scope] = number = self._made.get(scope, -1) + 1
        return scope, number

    def expected(self, epoch: int) -> bool:
        """Whether any rank may have added to one: all ranks make the same ones at the same places."""
        return -1 in self._made or epoch in self._made

    def add(self, depth: int, key: tuple[int, int], name: str, value: float) -> None:
        """Add to a sum in the innermost step in progress."""
        sums = self._pending.setdefault(depth, {}).setdefault(key, {})
        sums[name] = sums.get(name, 0.0) + value

    def take(self, depth: int) -> Mapping[tuple[int, int], Mapping[str, float]]:
        """What the step at ``depth`` has added; it is forgotten here."""
        return self._pending.pop(depth, {})

    def undo_beyond(self, depth: int) -> None:
        """Steps deeper than ``depth`` were lost."""
        self._pending = {at: sums for at, sums in self._pending.items() if at <= depth}
