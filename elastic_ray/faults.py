"""Scripted faults: what dies, at which step, at which moment (for tests and for trying out a set-up).

>>> Faults().kill(rank=1, step=7, moment="allreduce").hang(rank=0, step=9, moment="forward")
Faults(script=(Fault(action='kill', rank=1, step=7, moment='allreduce'), Fault(action='hang', rank=0, ...)))
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable

MOMENTS = (
    "forward",  # entering the wrapped model
    "backward",  # the first gradient of a backward pass is there
    "allreduce",  # the first bucket is on its way
    "optimizer_step",  # agreed, about to apply
    "after_step",  # applied, the step's edge not reached yet
    "edge",  # at the step's edge, before it is committed
    "joining",  # ready, waiting for the generation to begin
    "receiving",  # in the new generation, before the state is exchanged
    "leaving",  # out of the generation, before the train function has unwound
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``rank`` is the rank at that moment, ``None`` for whoever comes first; ``step`` counts committed
    steps (``None``: the first time the moment comes up)."""

    action: str
    rank: int | None
    step: int | None
    moment: str

    def __post_init__(self) -> None:
        if self.moment not in MOMENTS:
            raise ValueError(f"moment must be one of {', '.join(MOMENTS)}, but got {self.moment!r}")

    def due(self, *, rank: int, step: int, moment: str) -> bool:
        """Whether the fault strikes now."""
        return (
            self.moment == moment
            and (self.rank is None or self.rank == rank)
            and (self.step is None or self.step == step)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """A script of faults; each strikes once in a process."""

    script: tuple[Fault, ...] = ()

    def kill(self, *, moment: str, rank: int | None = None, step: int | None = None) -> Faults:
        """SIGKILL the worker."""
        return Faults((*self.script, Fault("kill", rank, step, moment)))

    def hang(self, *, moment: str, rank: int | None = None, step: int | None = None) -> Faults:
        """SIGSTOP the worker: alive for Ray, silent for everybody."""
        return Faults((*self.script, Fault("hang", rank, step, moment)))

    def out_of_memory(self, *, moment: str, rank: int | None = None, step: int | None = None) -> Faults:
        """Raise an out-of-memory error in the user's loop."""
        return Faults((*self.script, Fault("out_of_memory", rank, step, moment)))


class FaultInjector:
    """Carries out a script in one worker process.

    Args:
        faults: the script.
        claim: asks whether this process may carry out fault number i (each strikes once in a job's life).
    """

    def __init__(self, faults: Faults, claim: Callable[[int], bool]) -> None:
        self._open = dict(enumerate(faults.script))
        self._claim = claim

    def at(self, moment: str, *, rank: int, step: int) -> None:
        """Called by the session at each moment."""
        for index, fault in list(self._open.items()):
            if fault.due(rank=rank, step=step, moment=moment):
                del self._open[index]
                if self._claim(index):
                    _strike(fault)


def _strike(fault: Fault) -> None:
    if fault.action == "out_of_memory":
        raise MemoryError(f"scripted out of memory at {fault.moment}")
    os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
