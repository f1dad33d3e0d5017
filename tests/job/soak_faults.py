"""What happens to a cluster in a soak, and when: pure, so that a seed says it all."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Collection, Sequence


class FaultKind(enum.Enum):
    """What may happen."""

    KILL_WORKER = "a worker gets SIGKILL"
    STOP_WORKER = "a worker gets SIGSTOP, and SIGCONT later or never"
    KILL_CONTROLLER = "a controller gets SIGKILL"
    STOP_CONTROLLER = "a controller gets SIGSTOP, and SIGCONT later"
    KILL_ALLOCATOR = "the allocator gets SIGKILL"
    STOP_ALLOCATOR = "the allocator gets SIGSTOP, and SIGCONT later"
    ADD_NODE = "a node comes"
    DRAIN_NODE = "a node is drained, and goes when it is empty or its time is over"
    LOSE_NODE = "a node goes without notice"
    SLOW_STORAGE = "every call of the storage takes long, for a while"
    FAIL_STORAGE = "every call of the storage fails, for a while"


_OFTEN = {FaultKind.KILL_WORKER: 3, FaultKind.ADD_NODE: 2}  # the others once
_LAST_S = {  # how long each lasts, at least and at most [s]
    FaultKind.STOP_WORKER: (1.0, 12.0),
    FaultKind.STOP_CONTROLLER: (0.5, 2.5),
    FaultKind.STOP_ALLOCATOR: (0.5, 6.0),
    FaultKind.DRAIN_NODE: (5.0, 20.0),
    FaultKind.SLOW_STORAGE: (1.0, 8.0),
    FaultKind.FAIL_STORAGE: (0.5, 4.0),
}
_NEVER = 0.3  # share of the stopped workers that are never woken


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them.

    Attributes:
        at_s: when, from the beginning [s].
        kind: what.
        pick: in [0, 1): which of those that there are.
        lasts_s: for how long [s]; infinite for good, 0 where nothing lasts.
    """

    at_s: float
    kind: FaultKind
    pick: float
    lasts_s: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:6.1f} s  {self.kind.name.lower()} ({self.pick:.3f}){lasts}"

    def of(self, number: int) -> int:
        """Which of so many it meets."""
        return int(self.pick * number)


def schedule(
    seed: int, duration_s: float, kinds: Collection[FaultKind] = tuple(FaultKind), *, every_s: float = 2.5
) -> tuple[Fault, ...]:
    """Faults of these kinds in order of time, the same for the same arguments; all of them before any comes again.

    Args:
        seed: of the dice.
        duration_s: none comes later than this [s].
        kinds: those that may happen.
        every_s: mean time between two [s].
    """
    dice = random.Random(seed)
    deck = [kind for kind in FaultKind if kind in kinds for _ in range(_OFTEN.get(kind, 1))]
    rest: list[FaultKind] = []
    faults: list[Fault] = []
    at_s = 0.0
    while True:
        at_s += dice.uniform(0.2, 1.8) * every_s
        if at_s > duration_s or not deck:
            return tuple(faults)
        rest = rest or dice.sample(deck, len(deck))
        kind = rest.pop()
        pick, lasts_s = dice.random(), dice.uniform(*_LAST_S.get(kind, (0.0, 0.0)))
        if dice.random() < _NEVER and kind is FaultKind.STOP_WORKER:
            lasts_s = float("inf")
        faults.append(Fault(at_s=at_s, kind=kind, pick=pick, lasts_s=lasts_s))


def shown(faults: Sequence[Fault]) -> str:
    """A line for each."""
    return "\n".join(map(str, faults))
