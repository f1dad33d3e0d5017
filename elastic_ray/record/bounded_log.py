"""The last of many numbered things: bounded memory, constant time for each (pure)."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 1000


class BoundedLog(Generic[T]):
    """Things by number, of which only the last ones are kept.

    Numbers grow by one, but for this: they may come in another order, and a restart goes back and repeats some.

    Args:
        most: how many are kept.

    Attributes:
        first: smallest number that there ever was; 0 before the first.
        last: largest one.
        low: below it nothing is kept.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._things: dict[int, T] = {}
        self.low = 0
        self._full = False
        self.first = 0
        self.last = 0

    def __contains__(self, number: int) -> bool:
        return number in self._things

    def get(self, number: int) -> T | None:
        """The thing of this number; None if there is none (any more)."""
        return self._things.get(number)

    def gone(self, number: int) -> bool:
        """Whether things of this number are not kept any more."""
        return self._full and number < self.low

    def put(self, number: int, thing: T) -> None:
        """Keep a thing, in place of an earlier one of its number."""
        self.first = min(self.first or number, number)
        if self.gone(number):
            return
        if not self._full:
            self.low = self.first
        self._things[number] = thing
        self.last = max(self.last, number)
        while len(self._things) > self._most:
            self._full = True
            self._things.pop(self.low, None)
            self.low += 1

    def began_with(self, number: int) -> None:
        """The first thing had this number, though it is not kept."""
        self.first = number

    def values(self) -> tuple[T, ...]:
        """What is kept, by number."""
        return tuple(self._things[number] for number in sorted(self._things))
