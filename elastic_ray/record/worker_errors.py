"""Attribution of a train function's exception either to one worker, which is lost, or to the program (pure).

A program error occurs on every rank, or recurs. If only one worker raises an exception, and its replacement does not,
the exception is attributed to the worker's process, GPU or node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from elastic_ray.record.losses import Losses
from elastic_ray.worker.error_origin import ErrorOrigin
from placement.cluster.node_record import FORGET_S, NodeFailure

if TYPE_CHECKING:
    from elastic_ray.sealed import Raised

REMEMBER_S = 600.0
"""For so long after an exception the same one on another worker counts as its return [s]."""

_THIRD_S = 86400.0  # for so long a third of the same does, as an error of each epoch's end comes back
_ALIKE_OF_NODES = 4  # errors of devices at one place within an hour, whatever their nodes
_HOUR_S = 3600.0
_KEPT = 64

SEVERAL_NODES = 3
"""Nodes that must see an error of a device, or failed starts, before these are the program's."""

_STARTS_PER_WORKER = 3
_MOST_NOTED = 32  # failures that are reported to the allocator
_CAUSE = 120  # characters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """Exception raised by one worker."""

    worker: str
    node: str
    steps: int  # steps of all loaders that were committed by then
    origin: ErrorOrigin | None  # type and place; None where elastic_ray failed beside the train function
    raised: BaseException | Raised | None

    def is_like(self, other: WorkerError) -> bool:
        """True if both exceptions have the same type and were raised at the same location in the code."""
        mine, its = self.origin, other.origin
        return mine is not None and its is not None and (mine.kind, mine.place) == (its.kind, its.place)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorVerdict:
    """Verdict on a worker's exception: either it ends the job, or the job only loses the worker."""

    ends: BaseException | Raised | None  # the error that ends the job; None where only the worker is lost
    reason: str  # why, a sentence
    blames_node: bool = True  # the worker's node may be the cause


class WorkerErrors:
    """Decision-maker on whether a worker's exception ends the job, or only costs it the worker."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._members: list[tuple[float, WorkerError]] = []
        self._starts: list[WorkerError] = []
        self._tried: set[str] = set()
        self._newcomers: list[WorkerError] = []
        self._last: WorkerError | None = None
        self._last_of_member: WorkerError | None = None
        self._noted: list[tuple[float, NodeFailure]] = []

    def of_member(self, error: WorkerError, *, others_train: bool, now_s: float) -> ErrorVerdict:
        """Decide the consequence of an exception from a worker that was training.

        Args:
            others_train: True if other workers hold the state and have not returned from the train function.
        """
        origin = error.origin
        if origin is None or origin.refusal:
            return ErrorVerdict(ends=error.raised, reason="elastic_ray raised it")
        if not others_train and not origin.of_node:
            return self._programs(error, "no other worker trains on")
        if (before := self._same(error, now_s)) is not None:
            return self._programs(before, f"worker {before.worker} raised the same at the same place")
        # Several workers of a node that meet its fault in one step are one failure.
        counted = any((each.node, each.steps) == (error.node, error.steps) for _, each in self._members)
        self._members.append((now_s, error))
        self._last = self._last_of_member = error
        if not counted and not self._losses.one_raised():
            return ErrorVerdict(ends=error.raised, reason="FailureConfig(max_failures) allows no more lost workers")
        return ErrorVerdict(ends=None, reason="no other worker has raised the same")

    def _same(self, error: WorkerError, now_s: float) -> WorkerError | None:
        """Return an earlier exception that shows this one to be a program error; None if none does."""
        self._members = self._members[-_KEPT:]
        alike = [(now_s - at_s, each) for at_s, each in self._members if error.is_like(each)]
        lately = [each for ago_s, each in alike if ago_s < REMEMBER_S]
        if error.origin is not None and error.origin.of_node:
            within_hour = [each for ago_s, each in alike if ago_s < _HOUR_S]
            several = len({error.node, *(each.node for each in lately)}) >= SEVERAL_NODES
            return alike[0][1] if (lately and several) or len(within_hour) >= _ALIKE_OF_NODES else None
        before = [each for ago_s, each in alike if ago_s < _THIRD_S]
        return lately[0] if lately else before[0] if len(before) > 1 else None

    def of_newcomer(self, error: WorkerError, *, joined: bool, now_s: float) -> ErrorVerdict:
        """Decide the consequence of an exception from a worker that has trained no step in a training group yet.

        The exception ends the job only if the worker had ``joined`` the group and an earlier member was lost to the
        same exception.
        """
        before = self._same(error, now_s) if joined else None
        if before is not None:
            return self._programs(before, f"worker {before.worker} raised the same at the same place")
        alike = [each for each in self._newcomers if error.is_like(each) and each.node != error.node]
        self._newcomers = [*self._newcomers, error][-_KEPT:]
        if alike and error.origin is not None and not error.origin.of_node:
            self._noted = []  # as where the program cannot have more workers: newcomers fail wherever they are
            return ErrorVerdict(ends=None, reason="newcomers on other nodes fail alike", blames_node=False)
        return ErrorVerdict(ends=None, reason="it has not trained a step")

    def of_start(self, error: WorkerError, *, beside: Collection[str], nodes: int, wanted: int) -> ErrorVerdict:
        """Decide the consequence of an exception from a worker in a job that is not training yet.

        Args:
            beside: The job's other workers, all started before this exception.
            nodes, wanted: Number of nodes that could run a worker, and number of wanted workers; each limits failed
                starts.
        """
        origin = error.origin
        if origin is None or origin.refusal:
            return ErrorVerdict(ends=error.raised, reason="elastic_ray raised it")
        again = bool(self._starts) and error.worker not in self._tried and not origin.of_node
        self._tried.update(beside)
        alike = [each for each in self._starts if error.is_like(each)]
        self._starts.append(error)
        self._last = error
        if any(each.node != error.node for each in alike):
            return self._programs(error, "starts on two nodes failed alike")
        if alike and again:
            return self._programs(error, "the next start failed alike")
        failed = {each.node for each in self._starts}
        if len(failed) >= min(SEVERAL_NODES, max(1, nodes)):
            return self._programs(error, f"starts failed on {len(failed)} node(s)")
        if len(self._starts) >= _STARTS_PER_WORKER * max(1, wanted):
            return self._programs(error, f"{len(self._starts)} starts failed")
        return ErrorVerdict(ends=None, reason="other nodes may start it")

    def _programs(self, error: WorkerError, reason: str) -> ErrorVerdict:
        """Return a verdict that blames the program, and clear failures previously attributed to nodes."""
        self._noted = []
        return ErrorVerdict(ends=error.raised, reason=reason)

    def record(
        self, node: str, worker: str, cause: str, *, starting: bool, now_s: float, of_device: bool = False
    ) -> None:
        """Record a worker's failure on a node, to be reported to the allocator as a possible fault of the node."""
        told = {"node": node, "worker": worker, "cause": cause[:_CAUSE]}
        failure = NodeFailure(**told, age_s=0.0, starting=starting, of_device=of_device)
        self._noted = [*self._noted, (now_s, failure)][-_MOST_NOTED:]

    def failures(self, now_s: float) -> tuple[NodeFailure, ...]:
        """Return the worker failures in the 24 hours before ``now_s``."""
        aged = (dataclasses.replace(each, age_s=max(0.0, now_s - at_s)) for at_s, each in self._noted)
        return tuple(each for each in aged if each.age_s < FORGET_S)

    def all_lost(self) -> BaseException | Raised | None:
        """Return the exception that cost the job its last worker; None if the cause was not an exception."""
        return self._last.raised if self._last is not None else None

    def settled(self, *, started: bool = False) -> None:
        """Record that a group is training again; ``started`` means it started from a checkpoint or from scratch."""
        self._last, self._starts, self._tried = None, [], set()
        self._losses.settled()
        if started:  # its steps may be fewer than those before, and more than enough
            self._last_of_member = None

    def at_end(self, steps: int) -> BaseException | Raised | None:
        """Return the last lost member's exception if the survivors have not trained a step since; otherwise None."""
        last = self._last_of_member
        return last.raised if last is not None and last.steps >= steps else None
