"""When which slots were at work for which trial: a file per worker process, a line per step; and which were held."""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Some slots at work for a trial, from ``begin_s`` to ``end_s`` [s since the epoch]."""

    begin_s: float
    end_s: float
    slots: int
    trial: str


class WorkLog:
    """A file per process, a line per step."""

    def __init__(self, folder: str, trial: str) -> None:
        self._file = open(Path(folder) / f"{trial}.{os.getpid()}.{time.time_ns()}.work", "a", buffering=1)  # noqa: SIM115
        self._trial = trial
        self._last_s: float | None = None

    def start(self) -> None:
        """The first batch of an epoch has come."""
        self._last_s = time.time()

    def worked(self, slots: int = 1) -> None:
        """At work since the last call."""
        now_s = time.time()
        if self._last_s is None:  # it joined after the epoch's last batch
            self._last_s = now_s
        self._file.write(f"{self._last_s:.4f} {now_s:.4f} {slots} {self._trial}\n")
        self._last_s = now_s


def read_work(folder: Path) -> list[Work]:
    """All that was logged."""
    lines = [line.split() for file in folder.glob("*.work") for line in file.read_text().splitlines()]
    return [Work(begin_s=float(b), end_s=float(e), slots=int(n), trial=t) for b, e, n, t in lines]


def idle_share(work: Sequence[Work], slots: int, begin_s: float, end_s: float) -> float:
    """Part of all slots' time within [begin_s, end_s] in which they were not at work."""
    busy = sum(w.slots * max(0.0, min(w.end_s, end_s) - max(w.begin_s, begin_s)) for w in work)
    return 1.0 - busy / (slots * (end_s - begin_s))


def back_at_work(work: Sequence[Work], at_s: float, trial: str) -> float | None:
    """From a trial's stop until other trials have as many slots at work as all had just before it [s].

    None if the trial was not at work in the last second.
    """
    own = max((w.end_s for w in work if w.trial == trial and w.end_s <= at_s + 0.5), default=None)
    if own is None or own < at_s - 1.0:
        return None
    wanted = busy_at(work, own - 0.01)
    others = [w for w in work if w.trial != trial]
    for moment in sorted({w.begin_s for w in others if w.end_s > own}):
        if busy_at(others, moment + 1e-4) >= wanted:
            return max(0.0, moment - at_s)
    return None  # nobody had any use for them


def busy_at(work: Sequence[Work], moment_s: float) -> int:
    """Slots at work."""
    return sum(w.slots for w in work if w.begin_s <= moment_s < w.end_s)


class HeldSlots:
    """How many of the cluster's slots somebody has reserved, five times a second until :meth:`stop`."""

    def __init__(self, slots: int) -> None:
        import ray

        self._ask: Callable[[], dict[str, float]] = ray.available_resources
        self._slots = slots
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            taken = self._slots - self._ask().get("CPU", 0.0)
            if self._seen or taken:
                self._seen.append((time.time(), taken))

    def stop(self) -> float:
        """The mean share of the slots that was held, from the first reservation on."""
        self._over.set()
        self._thread.join()
        return statistics.mean(taken for _, taken in self._seen) / self._slots if self._seen else 0.0

    def slot_seconds(self, until_s: float) -> float:
        """Slots times the time for which they were held, until then [s since the epoch]."""
        return sum(
            taken * max(0.0, min(after, until_s) - before)
            for (before, taken), (after, _) in itertools.pairwise(self._seen)
        )
