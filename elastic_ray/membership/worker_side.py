"""SHELL: a worker's side of the membership protocol: it receives plans, and prepares, enters and leaves groups.

Two threads use this class. The *control thread* (a Ray call; absent without a trainer) delivers messages through
:meth:`WorkerMembership.post`. The *training thread* waits for agreement, switches and regroups. A third thread
forms groups, so that training in the current group continues in the meantime.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.background_work import start_thread
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.communication.retired_communicators import RetiredCommunicators
from elastic_ray.membership.messages import (
    BatchProposal,
    Cancel,
    ControllerMessage,
    CriticalBatch,
    GenerationSpec,
    StopJob,
    StrategiesKnown,
)
from placement.cluster.jobs import FoundStrategy

logger = logging.getLogger(__name__)

_DROP_S = 1.0  # a group that is still being dropped when the process exits is none of its business


class CommunicatorFactory(Protocol):
    """Protocol of slow functions that form a communicator and may raise ``CommunicationFailedError``."""

    def __call__(self, spec: GenerationSpec, rank: int) -> Communicator: ...


class LostGroupError(RuntimeError):
    """Error raised if no new generation (group) to continue with was announced in time."""


class WorkerMembership:
    """Membership of a worker: its current group, the group being prepared, and the controller's messages.

    Args:
        on_prepare_failed: Called (from the forming thread) with a generation that failed to form, and the reason.
        retired: Broken groups to be dropped later. All runs in a process share this object, which must outlive them.
        hears: True if the controller will send the strategies that earlier jobs have found.

    Attributes:
        current, communicator: Current generation and its group; None before the first.
        voided: True if the current generation was cancelled.
        prepared_ahead: Number of the prepared generation minus the current one's; 0 if none is prepared.
        wanted_batch: Batch shape that the controller requests in the current generation; None for no change.
        known_strategies: Fastest strategies for this model from other jobs, keyed by a description of the group;
            None until they arrive.
        critical_batch: Critical batch measured by the job's branches [samples]; 0 if unknown.
        stop_requested, preempting: True if the job must stop permanently, or must stop to continue later.
    """

    def __init__(
        self,
        worker: str,
        form: CommunicatorFactory,
        on_prepare_failed: Callable[[int, str], None],
        retired: RetiredCommunicators | None = None,
        *,
        hears: bool = False,
    ) -> None:
        self.worker, self._form, self._on_prepare_failed = worker, form, on_prepare_failed
        self._news = threading.Condition()
        self._spec: GenerationSpec | None = None
        self._prepared: tuple[GenerationSpec, Communicator | None] | None = None
        self._forming: threading.Thread | None = None
        self._void_below = 0
        self._cancelled: set[int] = set()
        self._retired = retired if retired is not None else RetiredCommunicators()
        self.current: GenerationSpec | None = None
        self.communicator: Communicator | None = None
        self.generation = self.prepared_ahead = 0
        self.voided = False
        self._wish: BatchProposal | None = None
        self.wanted_batch: BatchChoice | None = None
        self.critical_batch = 0
        self._hopeless = ""
        self.stop_requested = False
        self.preempting = False
        self.known_strategies: Mapping[str, FoundStrategy] | None = None if hears else {}

    def post(self, message: ControllerMessage) -> None:
        """Process a message from the controller, without blocking."""
        with self._news:
            match message:
                case GenerationSpec():
                    self._adopt_spec(message)
                case Cancel(generation=generation):
                    self._cancelled.add(generation)
                    self._void_groups()
                case BatchProposal():
                    self._wish = message
                case StrategiesKnown(strategies=strategies):
                    self.known_strategies = strategies
                case CriticalBatch(batch_size=batch_size):
                    self.critical_batch = batch_size
                case StopJob(save=True):
                    self.preempting = True
                case StopJob():
                    self.stop_requested = True
            self._update()
            self._news.notify_all()

    def _update(self) -> None:
        """Update the attributes that the training thread reads in every step."""
        self.generation = self.current.generation if self.current is not None else 0
        self.prepared_ahead = self._prepared[0].generation - self.generation if self._prepared is not None else 0
        wish = self._wish
        self.wanted_batch = wish.batch if wish is not None and wish.generation == self.generation else None
        self.voided = self.communicator is not None and self.communicator.voided

    def give_up(self, why: str) -> None:
        """Stop expecting further generations (groups); calls that wait for one raise an error with ``why`` at once."""
        with self._news:
            self._hopeless = why
            self._news.notify_all()

    def _adopt_spec(self, spec: GenerationSpec) -> None:
        """Accept an announced generation and start forming its group, unless it is void or outdated."""
        self._void_below = max(self._void_below, spec.void_below)
        if self.is_void(spec.generation):
            return  # its cancellation was faster
        if self._spec is not None and spec.generation <= self._spec.generation:
            return
        self._spec, self.critical_batch = spec, spec.critical_batch or self.critical_batch
        self._void_groups()
        rank = spec.rank_of(self.worker)
        if rank is None:
            self._prepared = (spec, None)  # nothing to form: this worker leaves
            return
        self._forming = start_thread(self._prepare, f"form-{spec.generation}", spec, rank)

    def is_void(self, generation: int) -> bool:
        """True if the generation (group) with this number was cancelled or superseded."""
        return generation < self._void_below or generation in self._cancelled

    def _void_groups(self) -> None:
        """Void the groups of cancelled generations."""
        if self.current is not None and self.communicator is not None and self.is_void(self.current.generation):
            self.communicator.void()
        if self._prepared is not None and self.is_void(self._prepared[0].generation):
            _, communicator = self._prepared
            self._prepared = None
            if communicator is not None and communicator is not self.communicator:
                communicator.void()
                self._retired.retire(communicator)

    def _prepare(self, spec: GenerationSpec, rank: int) -> None:
        """Form the group of a generation in a separate thread, and report a failure."""
        try:
            communicator = self._form(spec, rank)
        except Exception as error:  # whatever it is, the change must not wait for this worker
            if not isinstance(error, CommunicationFailedError):
                logger.exception("worker %s: generation %d did not form", self.worker, spec.generation)
            logger.info("worker %s: generation %d did not form: %s", self.worker, spec.generation, error)
            if not self.is_void(spec.generation):
                self._on_prepare_failed(spec.generation, str(error))
            return
        with self._news:
            stale = self._spec is None or self._spec.generation != spec.generation
            if stale or self.is_void(spec.generation):
                communicator.void()
                self._retired.retire(communicator)
            else:
                self._prepared = (spec, communicator)
                self._update()
            self._news.notify_all()

    def prepared_spec(self, generation: int) -> GenerationSpec | None:
        """Return the specification of ``generation`` if its group has formed and is valid; otherwise None."""
        prepared = self._prepared
        return prepared[0] if prepared is not None and prepared[0].generation == generation else None

    def take(self, generation: int) -> tuple[GenerationSpec, Communicator | None] | None:
        """Make the prepared group of ``generation`` the current one; None if the group was cancelled in the meantime.

        The communicator is None if this worker is not a member of the generation and must leave.
        """
        with self._news:
            if self._prepared is None or self._prepared[0].generation != generation:
                return None
            spec, communicator = self._prepared
            self._prepared = None
            if self.communicator is not None:
                self._retired.retire(self.communicator)
            self.current, self.communicator = spec, communicator
            self._update()
            return spec, communicator

    def await_next(self, *, timeout_s: float) -> tuple[GenerationSpec, Communicator | None]:
        """Wait for the next group, and make it the current one.

        A newcomer accepts any group. A member whose group is broken accepts only a group that replaces it, not a
        planned change.

        Raises LostGroupError if no group has formed within ``timeout_s`` [s], or none ever will.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: self._may_take() or self.stop_requested or self._hopeless,
                    timeout=max(0.0, deadline - time.monotonic()),
                )
                prepared = self._prepared if self._may_take() else None
            if prepared is None:
                raise LostGroupError(
                    self._hopeless
                    or f"worker {self.worker} heard of no generation after {self.generation} within {timeout_s:.0f} s"
                )
            taken = self.take(prepared[0].generation)
            if taken is not None:
                return taken

    def _may_take(self) -> bool:
        return self._prepared is not None and (self.current is None or self.is_void(self.current.generation))

    def close(self, *, broken: bool) -> None:
        """Release all groups; ``broken`` is True if operations may still be pending in them."""
        with self._news:
            for communicator in (self.communicator, self._prepared[1] if self._prepared else None):
                if communicator is not None:
                    if broken:
                        communicator.mark_broken()
                    self._retired.retire(communicator)
            self.communicator, self._prepared = None, None
            self._update()
        if self._forming is not None:
            self._forming.join(timeout=1.0)
        self._retired.drop_healthy(_DROP_S)
