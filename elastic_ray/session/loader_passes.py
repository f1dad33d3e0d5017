"""SHELL: the passes of a run's loaders: each step's end, and each pass's, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.state.progress import PassProgress, RunProgress
from elastic_ray.steps.ledger import LostStep
from elastic_ray.steps.step import LoaderStep


class Changes(Protocol):
    """Changes of group and batch."""

    def between_steps(self, can_switch: Callable[[int], bool]) -> None:
        """Carry out what the ranks have agreed on."""

    def regroup(self, cause: str) -> int:
        """Find a group to go on with; returns the loader passes that its furthest rank has ended."""


class PassState(Protocol):
    """The state that all ranks share."""

    @property
    def progress(self) -> RunProgress:
        """Where the run stands."""


class PassLedger(Protocol):
    """Which step this rank is in, and what of it counts."""

    @property
    def step(self) -> LoaderStep | None:
        """The innermost step in progress."""

    @property
    def depth(self) -> int:
        """How many steps are in progress, one within the other."""

    @property
    def next_ordinal(self) -> int:
        """Ordinal that the next loader pass of this epoch would get."""

    @property
    def loader_steps(self) -> int:
        """Committed steps of any loader."""

    @property
    def failure(self) -> str | None:
        """Why the step in progress is lost; None where it is not."""

    @property
    def needs_vote(self) -> bool:
        """Whether the step that has just ended has made no collective on which the ranks' vote could ride."""

    @property
    def trains(self) -> bool:
        """Whether the outermost step has trained."""

    def begin_pass(self) -> int:
        """The epoch's next loader pass begins; returns its number in the epoch."""

    def end_pass(self, ended: PassProgress) -> None:
        """All ranks have left a pass."""

    def begin(self, step: LoaderStep) -> None:
        """A loader is about to hand out the first micro-batch of a step."""

    def end(self, expected: PassProgress | None = None) -> LoaderStep:
        """The body of the innermost step has run; returns it, to be committed or undone."""

    def commit(self, step: LoaderStep, generation: int, gain: Callable[[float], float]) -> bool:
        """Count a step that has ended; returns whether it trained."""

    def undo(self, step: LoaderStep) -> LostStep:
        """A step that has ended was lost: take back what user code moved on in it."""

    def resume(self, lost: LostStep, cause: str) -> None:
        """A group was found after :meth:`undo`."""

    def abandon(self, left: PassProgress) -> None:
        """User code left a pass in the middle of a step."""

    def abandon_all(self) -> None:
        """The epoch is over, and with it passes whose iterators still wait for their ``next``."""

    def take_abandoned(self) -> LoaderStep | None:
        """The innermost of the steps that were left, to be committed now; None when there is no more."""


class PassSums(Protocol):
    """What accumulators were given in steps that are not committed yet."""

    def expected(self, epoch: int) -> bool:
        """Whether any rank may have added to one."""

    def take(self, depth: int) -> Mapping[tuple[int, int], Mapping[str, float]]:
        """What the step at ``depth`` has added, once."""

    def undo_beyond(self, depth: int) -> None:
        """Steps deeper than ``depth`` were lost."""


class PassVotes(Protocol):
    """This rank's votes."""

    def vote(
        self, what: Announced, added: Mapping[tuple[int, int], Mapping[str, float]], *, some_are_idle: bool = False
    ) -> Iterable[tuple[tuple[int, int], str, float]]:
        """Agree, and add up what the ranks' accumulators were given; raises ``CommunicationFailedError``."""


class PassGroup(Protocol):
    """The present group."""

    @property
    def generation(self) -> int:
        """Its number."""

    @property
    def communicator(self) -> Communicator:
        """Its communicator."""


class StepGains(Protocol):
    """The wrapped models, as far as they say what a step is worth."""

    def gain(self, scale: float) -> float:
        """Statistical progress of a step at ``scale`` x the initial batch size, in steps at that size."""


class PassParts(Protocol):
    """What the train function has registered."""

    @property
    def models(self) -> StepGains:
        """The wrapped models."""

    @property
    def strategy_key(self) -> str | None:
        """Tells strategies apart of which step times are not to be mixed; None while one is being chosen."""

    @property
    def buffer_layout(self) -> int:
        """What the ranks must have in common to synchronise buffers."""

    def sync_buffers(self, communicator: Communicator) -> None:
        """Make all buffers equal on all ranks."""

    def drift_layout(self, *, trained: bool) -> int:
        """What the ranks must have in common to average them after a step."""

    def after_step(self) -> None:
        """All ranks have committed a step that trained; raises CommunicationFailedError."""

    def collapse(self) -> None:
        """Make models one that differ from rank to rank; raises CommunicationFailedError."""


class PassClock(Protocol):
    """Times of steps."""

    def edge(self, shape: BatchChoice | None, micro_steps: int, samples: int, strategy: str | None) -> None:
        """A step was committed; ``shape`` None when it trained nothing, ``strategy`` while one is being chosen."""

    def micro(self) -> None:
        """A micro-step that does not synchronise was done."""


class PassRun(Protocol):
    """The parts of a run that its loaders' passes go through."""

    @property
    def states(self) -> PassState:
        """What all ranks share."""

    @property
    def ledger(self) -> PassLedger:
        """Which step this rank is in."""

    @property
    def sums(self) -> PassSums:
        """What accumulators were given in steps that are not committed yet."""

    @property
    def consensus(self) -> PassVotes:
        """This rank's votes."""

    @property
    def group(self) -> PassGroup:
        """The present group."""

    @property
    def registry(self) -> PassParts:
        """What the train function has built."""

    @property
    def clock(self) -> PassClock:
        """Times of steps."""


class LoaderPasses:
    """See the module's text.

    Args:
        parts: of the run.
        changes: of group and batch.
        moment: a named moment of the run, for scripted faults.
    """

    def __init__(self, parts: PassRun, changes: Changes, moment: Callable[[str], None]) -> None:
        self._parts = parts
        self._changes = changes
        self._moment = moment
        self._deferred_change: Callable[[int], bool] | None = None

    @property
    def _progress(self) -> RunProgress:
        return self._parts.states.progress

    @property
    def step(self) -> LoaderStep | None:
        """The innermost step in progress."""
        return self._parts.ledger.step

    @property
    def next_ordinal(self) -> int:
        """Ordinal that the next pass of this epoch would get."""
        return self._parts.ledger.next_ordinal

    def begin_step(self, step: LoaderStep) -> None:
        """A loader is about to hand out the first micro-batch of a step."""
        self._parts.ledger.begin(step)

    def end_micro_step(self) -> None:
        """A micro-step that does not synchronise was done."""
        self._parts.clock.micro()

    def abandon(self, left: PassProgress) -> None:
        """The user's code left a pass in the middle of a step. Whether by ``break`` or by an exception shows later:
        only the former goes on, and then :meth:`settle` commits the step and ends the pass. An iterator that outlives
        its epoch has been settled already."""
        self._parts.ledger.abandon(left)

    def enter(self) -> PassProgress:
        """The next loader pass of this epoch, with the position that it has already reached.

        Raises:
            RuntimeError: a pass over whole batches is in progress.
        """
        self.settle()
        ordinal = self._parts.ledger.begin_pass()
        self._catch_up()
        return self._progress.passes[ordinal]

    def end_epoch(self) -> None:
        """The epoch's body has run to its end, and with it passes whose iterators still wait for their ``next``."""
        self._parts.ledger.abandon_all()
        self.settle()
        self._progress.keep_sums()
        self._progress.end_epoch()
        self._catch_up()

    def edge(self, loader_pass: PassProgress | None = None, *, ends_pass: bool = False) -> bool:
        """The step's body has run: commit it, or find a group to go on with and have it drawn again.

        Args:
            loader_pass: the pass whose step it is; None for the innermost.
            ends_pass: the loop was left in this step, and what happens between two steps is put off.

        Returns:
            Whether the step was committed (by this rank, or by a survivor whose state it took over).

        Raises:
            RuntimeError: another pass was begun within the step and has not ended.
            WorkerDismissed: this worker leaves here, or the job was stopped.
        """
        self.settle()
        parts, ledger = self._parts, self._parts.ledger
        step = ledger.end(loader_pass)
        before = ledger.loader_steps
        self._moment("edge")
        nested = ledger.step is not None
        try:
            if ledger.failure is not None:
                raise CommunicationFailedError(ledger.failure)
            if ledger.needs_vote or parts.sums.expected(self._progress.epoch):
                averaged = 0 if nested else parts.registry.drift_layout(trained=ledger.trains)
                self._vote(Announced(Intent.EDGE, ledger.depth + 1, averaged), some_are_idle=step.leaves_ranks_idle)
        except CommunicationFailedError as error:
            self._recover(step, str(error))
            return ledger.loader_steps > before
        trained = ledger.commit(step, parts.group.generation, parts.registry.models.gain)
        if not nested and self._averaged(trained=trained):
            shape = step.shape if trained else None
            parts.clock.edge(shape, step.micro_steps, step.count, parts.registry.strategy_key)
            if not ends_pass:
                self._changes.between_steps(step.can_switch)
        return True

    def _averaged(self, *, trained: bool) -> bool:
        """Average models after a step that is committed; False if the group broke, and another one was entered."""
        try:
            if trained:
                self._parts.registry.after_step()
        except CommunicationFailedError as error:
            self._changes.regroup(str(error))
            return False
        return True

    def end_pass(self, loader_pass: PassProgress, total: int, *, put_off: bool = False) -> None:
        """A loader pass has run out: leave it together, so that no rank is ever more than one step ahead.

        Args:
            loader_pass: the pass.
            total: its samples.
            put_off: the user's code behind the loop has run already. What happens between two steps waits until the
                progress says so; a joiner, or the job when it goes on later, does not run that code again.

        Raises:
            WorkerDismissed: as in :meth:`edge`.
        """
        parts, ended = self._parts, self._progress.ended_passes
        while self._progress.ended_passes == ended:
            try:
                self._vote(Announced(Intent.END_OF_PASS, self._parts.ledger.depth, parts.registry.buffer_layout))
                self._progress.end_pass()
                parts.registry.sync_buffers(parts.group.communicator)
                if self._parts.ledger.depth == 0:
                    parts.registry.collapse()
            except CommunicationFailedError as error:
                furthest = self._changes.regroup(str(error))
                # Others are through: they only differ in code that this rank will run by itself.
                self._progress.follow_passes(furthest)
        self._parts.ledger.end_pass(loader_pass)
        if self._parts.ledger.depth == 0:
            self._deferred_change = lambda world_size: total >= world_size
            if not put_off:
                self._catch_up()

    def settle(self) -> None:
        """Commit steps that were left by ``break``, and end their passes."""
        while (step := self._parts.ledger.take_abandoned()) is not None:
            loader_pass, total = step.loader_pass, step.total
            self.edge(ends_pass=True)
            self.end_pass(loader_pass, total, put_off=True)

    def _catch_up(self) -> None:
        """Do what was put off at the end of a pass."""
        can_switch, self._deferred_change = self._deferred_change, None
        if can_switch is not None:
            self._changes.between_steps(can_switch)

    def _vote(self, what: Announced, *, some_are_idle: bool = False) -> None:
        added = self._parts.sums.take(self._parts.ledger.depth + 1)
        self._progress.add_sums(self._parts.consensus.vote(what, added, some_are_idle=some_are_idle))

    def _recover(self, step: LoaderStep, cause: str) -> None:
        """A step was lost: undo what user code moved on in it, and go on with the workers that are left."""
        parts = self._parts
        parts.sums.undo_beyond(parts.ledger.depth)
        lost = parts.ledger.undo(step)
        self._changes.regroup(cause)
        parts.ledger.resume(lost, cause)
