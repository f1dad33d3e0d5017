"""Scripted faults for testing code and setups, each with an action, a step and a moment.

>>> faults = Faults().kill(rank=1, step=7, moment="allreduce").hang(rank=0, step=9, moment="forward")
>>> [fault.action for fault in faults.script]
['kill', 'hang']
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
    "vote",  # a vote is on its way: on an update of optimizer state in tiles, or of rows that owners have gradients for
    "optimizer_step",  # agreed, about to apply
    "publish",  # owners have updated tiles, parameters are about to be sent to all
    "rows",  # a group begins: rows of a sharded model are about to move
    "restore",  # after a change of the group, after an update: more tiles are about to move to their new owners
    "after_step",  # applied, the step's edge not reached yet
    "edge",  # at the step's edge, before it is committed
    "end_of_pass",  # all ranks have agreed that a pass over a loader is over, and are about to make buffers equal
    "save",  # all ranks have agreed to write their parts of a checkpoint, and this one is about to
    "average",  # committed, models about to be averaged
    "collective",  # user code's own is about to be announced
    "after_collective",  # this rank has its result
    "joining",  # ready, waiting for the generation to begin
    "receiving",  # in the new generation, before the state is exchanged
    "received",  # its state is that of the others, which is to be proven
    "leaving",  # out of the generation, before the train function has unwound
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Fault (kill, hang or out-of-memory error) to inject into one worker at a given moment in a step."""

    action: str  # "kill", "hang" or "out_of_memory"
    moment: str  # one of ``MOMENTS``
    rank: int | None = None  # rank at that moment; None for the first worker that comes there
    step: int | None = None  # committed steps by then; None for the first time the moment comes up
    worker: str | None = None  # id of the worker (``w1`` is the job's first, ``w2`` its second...); None for any

    def __post_init__(self) -> None:
        if self.moment not in MOMENTS:
            raise ValueError(f"moment must be one of {', '.join(MOMENTS)}, but got {self.moment!r}")

    def due(self, *, worker: str, rank: int, step: int, moment: str) -> bool:
        """True if the fault must be injected at this moment: its rank, step and worker match or are None."""
        return (
            self.moment == moment
            and (self.worker is None or self.worker == worker)
            and (self.rank is None or self.rank == rank)
            and (self.step is None or self.step == step)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """Script of faults to inject, each once, at a given ``moment``, rank, step and worker id; None matches any.

    Examples:
        >>> from elastic_ray.faults import Faults
        >>> Faults().kill(rank=1, step=7, moment="backward").script[0].step
        7
    """

    script: tuple[Fault, ...] = ()

    def kill(
        self, *, moment: str, rank: int | None = None, step: int | None = None, worker: str | None = None
    ) -> Faults:
        """Return the script plus a fault that kills the worker with SIGKILL."""
        return Faults((*self.script, Fault("kill", moment, rank, step, worker)))

    def hang(
        self, *, moment: str, rank: int | None = None, step: int | None = None, worker: str | None = None
    ) -> Faults:
        """Return the script plus a fault that stops the worker with SIGSTOP: it seems alive but sends nothing."""
        return Faults((*self.script, Fault("hang", moment, rank, step, worker)))

    def out_of_memory(
        self, *, moment: str, rank: int | None = None, step: int | None = None, worker: str | None = None
    ) -> Faults:
        """Return the script plus a fault that raises an out-of-memory error in the user's loop."""
        return Faults((*self.script, Fault("out_of_memory", moment, rank, step, worker)))


class FaultInjector:
    """Executor of a fault script in one worker process.

    Args:
        claim: Function that returns True if this process may inject fault number i; it grants each fault only once.
    """

    def __init__(self, faults: Faults, claim: Callable[[int], bool]) -> None:
        self._open = dict(enumerate(faults.script))
        self._claim = claim

    def at(self, moment: str, *, worker: str, rank: int, step: int) -> None:
        """Inject the faults due at this moment in the step; they may kill or stop this process, or raise an error."""
        for index, fault in list(self._open.items()):
            if fault.due(worker=worker, rank=rank, step=step, moment=moment):
                del self._open[index]
                if self._claim(index):
                    _strike(fault)


def _strike(fault: Fault) -> None:
    if fault.action == "out_of_memory":
        raise MemoryError(f"scripted out of memory at {fault.moment}")
    os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
