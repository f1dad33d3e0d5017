"""SHELL: one train function's run in one process: steps, their edges, and the changes of group between them.

The loader's ``__next__`` and the wrapped optimizer's ``step`` are the only callers that may change anything; user
code between them never sees membership, batch size or learning rate move.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.reports import LoaderInfo, ModelInfo, StepReport
from elastic_ray.faults import FaultInjector
from elastic_ray.membership.plan import Place, Plan
from elastic_ray.membership.rendezvous import CommunicationFailedError, Communicator
from elastic_ray.membership.worker_side import Membership
from elastic_ray.session.announcer import Announcer
from elastic_ray.session.controller_client import Link
from elastic_ray.session.intents import Announced, Intent
from elastic_ray.session.models import Noise, WrappedModels
from elastic_ray.session.optimizer_watch import OptimizerWatch
from elastic_ray.session.step import Step
from elastic_ray.session.step_clock import StepClock
from elastic_ray.session.step_sums import StepSums
from elastic_ray.session.transitions import Passage, WorkerDismissed
from elastic_ray.session.vote import Agreement, with_names_of_first_rank
from elastic_ray.state.layout import digest
from elastic_ray.state.progress import LoopProgress, RunProgress
from elastic_ray.state.replicas import Replicas
from elastic_ray.state.shared_state import SharedState

# Nearly always all ranks return at once; one that is alone with it for longer goes ahead.
_PARTING_WAIT_S = 0.5
# Edges at which a planned change of group waits for gradients that are different on each rank.
_LONGEST_WAIT = 1000


class Buffers(Protocol):
    """What makes a model's buffers equal on all ranks, in collectives whose sizes follow from their layout."""

    @property
    def layout(self) -> object:
        """What must be the same on all ranks."""

    def __call__(self, communicator: Communicator) -> None:
        """Synchronise."""


class Carried(Protocol):
    """One model's gradients that user code adds up over several steps."""

    @property
    def local(self) -> bool:
        """Whether they differ from rank to rank."""

    def enter(self) -> None:
        """A group was entered."""


class Session:
    """See the module's text. One instance serves one run of a train function.

    Args:
        worker: id of this worker, unique in the job.
        membership: this worker's side of the membership protocol.
        link: the way to the controller.
        progress: where to start: the beginning, a checkpoint's resume point, or state kept through a rerun.
        kept: captured states from before a rerun in this process, or of an automatic checkpoint; they make this worker
            a holder of state.
        kept_from: path of the automatic checkpoint.
        elastic: whether the group may change (then the loop must use ``remaining_epochs_until``).
        regroup_timeout_s: longest wait for a generation to go on with.
        faults: scripted faults, None outside tests.
        job: its name.
        expected: where this worker will stand in the group that it is to join, as far as that is known.
        explain: why a collective of a group that cannot change has failed, from what that says itself.
    """

    def __init__(
        self,
        worker: str,
        membership: Membership,
        link: Link,
        *,
        progress: RunProgress | None = None,
        kept: dict[str, Any] | None = None,
        kept_from: str = "",
        elastic: bool = True,
        join_timeout_s: float = 600.0,
        regroup_timeout_s: float = 60.0,
        faults: FaultInjector | None = None,
        job: str = "local",
        expected: Place | None = None,
        explain: Callable[[str], str] = str,
    ) -> None:
        self.worker = worker
        self.job = job
        self.membership = membership
        self.link = link
        self.shared = SharedState(progress or RunProgress())
        self.elastic = elastic
        self.synced = False
        self.in_epochs = False
        self.checkpoint: Any = None
        self.loader: LoaderInfo | None = None
        self.leading_loader: weakref.ref[Any] | None = None  # its worker processes must go when the user lets it go
        self.clock = StepClock()
        self.models = WrappedModels()
        self.step: Step | None = None
        self.shape_changes = 0
        self.on_shape_change: list[Callable[[], None]] = []
        self.agreement = Agreement(membership)
        self.sums = StepSums()
        self.late: list[weakref.WeakMethod[Any]] = []  # of loaders made after this run's first epoch
        self.between_steps: list[Callable[[], None]] = []
        self.before_first_epoch: list[Callable[[], None]] = []
        self.buffers: list[Buffers] = []
        self.carried: list[Carried] = []
        self.left_out: list[Callable[[], None]] = []  # called when an update is left out, of whichever model
        self.replicas = Replicas()
        self.watched = OptimizerWatch(self)
        self.before_the_end: list[Callable[[], None]] = []
        self._announcer: Announcer | None = None
        self._abandoned = 0
        self._put_off: Callable[[int], bool] | None = None
        self._left = 0
        self._waited = 0
        self._replay: tuple[int, dict[tuple[int, int], dict[str, float]], int] | None = None
        self.applying = False
        self._ordinals_run = False
        self._kept = kept
        self._kept_from = kept_from
        self._join_timeout_s = join_timeout_s
        self._passage = Passage(membership, link, self._enter, self.moment, regroup_timeout_s=regroup_timeout_s)
        self._faults = faults
        self._expected = expected or Place()
        self._explain = explain
        self._outer: list[Step] = []
        self._ordinal = 0
        self._slot_seen = 0
        self._failure: str | None = None
        self._reduced = False
        self._trains = False

    # -- what the rest of the package reads --------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The present generation's plan."""
        if self.membership.current is None:
            raise RuntimeError("the session has not entered a generation yet")
        return self.membership.current

    @property
    def progress(self) -> RunProgress:
        """Where the run stands."""
        return self.shared.progress

    @property
    def shape(self) -> BatchChoice | None:
        """Batch shape of the adaptive loader, None where its own default holds."""
        return self.shared.shape

    @property
    def rank(self) -> int:
        """Rank of this worker in the present generation; 0 before the first."""
        communicator = self.membership.communicator
        return communicator.rank if communicator is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the present generation; 1 before the first."""
        communicator = self.membership.communicator
        return communicator.world_size if communicator is not None else 1

    @property
    def place(self) -> Place:
        """Where this worker stands in the present generation; before the first, where it is expected to."""
        plan = self.membership.current
        if plan is None or self.membership.communicator is None:
            return self._expected
        return plan.place_of(self.worker)

    @property
    def communicator(self) -> Communicator:
        """The present generation's communicator."""
        if self.membership.communicator is None:
            raise RuntimeError("the session has not entered a generation yet")
        return self.membership.communicator

    @property
    def outermost_step(self) -> Step | None:
        """The training step in progress, also while an evaluation pass runs inside it."""
        return self._outer[0] if self._outer else self.step

    @property
    def accumulating(self) -> bool:
        """Whether the micro-step in progress leaves its gradients to a later one of its step."""
        step = self.outermost_step
        return step is not None and not step.is_last_micro and self._abandoned < self.depth

    @property
    def epochs_done(self) -> float:
        """Epochs of data trained on so far, fractions included."""
        step = self.outermost_step
        return self.progress.epoch + (step.loop.position / step.total if step is not None and step.total else 0.0)

    def new_model(self, told: ModelInfo, noise: Noise) -> int:
        """Number of a newly wrapped model, in the order in which the loop wraps them."""
        if self.synced:
            raise RuntimeError(
                "AdaptiveDataParallel must wrap every model before the first epoch, so that all workers hold the same. "
                "For several trainings in one job (the folds of a cross-validation) wrap all their models first and "
                "divide one count of epochs among them: `for count in remaining_epochs_until(folds * epochs): "
                "fold, epoch = divmod(count, epochs)`; or submit a job each"
            )
        return self.models.add(told, noise)

    def new_accumulator(self) -> tuple[int, int]:
        """Key of a newly made accumulator: its epoch (-1 outside epochs) and its number there."""
        return self.sums.new_key(self.progress.epoch if self._ordinals_run else -1)

    @property
    def failed(self) -> bool:
        """Whether the step in progress is lost and will be drawn again."""
        return self._failure is not None

    def tell(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Tell the job's user something, from rank 0; all ranks come by here."""
        if self.place.rank == 0:
            self.link.tell(kind, text, dict(detail or {}))

    def moment(self, name: str) -> None:
        """A named moment of the run, for scripted faults."""
        if self._faults is not None:
            self._faults.at(name, worker=self.worker, rank=self.rank, step=self.progress.steps)

    # -- entering the job --------------------------------------------------------------------------------------

    def sync_point(self) -> None:
        """Where a worker becomes part of the job: everything is built, nothing has been trained.

        Raises:
            WorkerDismissed: the job ended or shrank before this worker's turn came.
            UnsafeStateError: a state could not be sent to another worker.
        """
        if self.synced:
            return
        for prepare in self.before_first_epoch:
            prepare()
        if self.elastic:
            self.shared.check_plain()  # here it is the user's to mend; in the middle of a change it would be too late
        if self._kept is not None:
            try:
                self.shared.install(self._kept)
            except (RuntimeError, ValueError, KeyError) as error:
                if not self._kept_from:
                    raise
                raise RuntimeError(
                    f"the job has an automatic checkpoint of another model or optimizer: {error} Go on with the "
                    f"model that {self._kept_from} was saved from, or start anew under another RunConfig(name)"
                ) from error
            self.shared.complete, self.shared.loaded = True, bool(self._kept_from)
            self._kept = None
        told = dataclasses.replace(self.loader, models=self.models.told) if self.loader is not None else None
        loaded = self.progress.steps if self.shared.loaded else 0
        self.link.ready(told, has_state=self._holds_state(), loaded=loaded)
        self.moment("joining")
        self._passage.join(self._holds_state, timeout_s=self._join_timeout_s)
        self.synced = True
        if self.progress.loops:
            # The user's code between here and the pass that the others are in has had its effect already.
            self.shared.snapshot()
            self._replay = (len(self.progress.loops) - 1, copy.deepcopy(self.progress.sums), self.progress.reports)

    def _holds_state(self) -> bool:
        """Whether this worker's state would be lost with it."""
        return self.shared.complete and not self.shared.loaded

    def keep_state(self) -> tuple[dict[str, Any], RunProgress] | None:
        """What a rerun in this process needs to go on from here; None when there is no whole state to keep."""
        if not self.synced or self.applying:  # a state that was changed half-way is none
            return None
        self.shared.roll_back()
        return self.shared.capture(), self.progress

    # -- loader passes -----------------------------------------------------------------------------------------

    def enter_loop(self) -> LoopProgress:
        """The next loader pass of this epoch, with the position that it has already reached.

        Raises:
            RuntimeError: an elastic job whose loop does not use ``remaining_epochs_until``.
        """
        if not self.synced:
            if self.elastic and not self.in_epochs:
                raise RuntimeError(
                    "an AdaptiveDataLoader must be iterated inside `for epoch in "
                    "elastic_ray.remaining_epochs_until(n):`, so that workers who join later start in the right epoch"
                )
            self.sync_point()
        self.settle()
        if self.step is not None and self.step.whole:
            raise RuntimeError(
                "no loader may be iterated within a pass over whole_batches=True: towards its end some ranks have no "
                "batch there, and would miss that loop; iterate one after the other"
            )
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        if self._replay is not None and ordinal >= self._replay[0]:
            self.shared.roll_back()
            _, self.progress.sums, self.progress.reports = self._replay
            self._replay = None
        if ordinal == len(self.progress.loops):
            self.progress.loops.append(LoopProgress())
        self._catch_up()
        return self.progress.loops[ordinal]

    def begin_epoch(self) -> None:
        """Count loader passes from the first again."""
        self._ordinals_run = True
        self._ordinal = 0

    def end_epoch(self) -> None:
        """The epoch's body has run to its end, and with it passes whose iterators still wait for their ``next``."""
        self._abandoned = self.depth
        self.settle()
        # This epoch's sums stay for code after the loop to read; until the next ones are there.
        kept = (-1, self.progress.epoch)
        self.progress.sums = {key: sums for key, sums in self.progress.sums.items() if key[0] in kept}
        self.progress.end_epoch()
        self._catch_up()

    def begin_step(self, step: Step) -> None:
        """A loader is about to hand out the first micro-batch of a step."""
        if self.step is not None:
            self._outer.append(self.step)
        else:
            self._slot_seen = 0
            self._failure = None
            self._reduced = self._trains = False
            if self.elastic:  # else no step is ever drawn again
                self.shared.snapshot()
        self.step = step

    @property
    def depth(self) -> int:
        """Loader passes that are in the middle of a step (a nested evaluation makes it 2)."""
        return len(self._outer) + (self.step is not None)

    @property
    def next_ordinal(self) -> int:
        """Ordinal that the next loader pass of this epoch would get."""
        return self._ordinal

    def edge(self, loop: LoopProgress | None = None, *, ends_pass: bool = False) -> bool:
        """The step's body has run: commit it, or find a group to go on with and have it drawn again.

        Args:
            loop: the pass whose step it is; None for the innermost.
            ends_pass: the loop was left in this step, and what happens between two steps is put off.

        Returns:
            Whether the step was committed (by this rank, or by a survivor whose state it took over).

        Raises:
            RuntimeError: another pass was begun within the step and has not ended.
            WorkerDismissed: this worker leaves here, or the job was stopped.
        """
        self.settle()
        if self.applying:
            self.may_apply()  # raises
        if loop is not None and self.step is None:
            raise RuntimeError(
                "an iterator over an AdaptiveDataLoader belongs to the epoch in which it was made, and that is over: "
                "call iter(loader) again in each epoch"
            )
        if loop is not None and self.step is not None and self.step.loop is not loop:
            raise RuntimeError(
                "loops over AdaptiveDataLoaders may be nested but not interleaved, as zip(loader_a, loader_b) does: "
                "use one loader over a dataset that gives both items"
            )
        step = self._take_step()
        ticks = self.progress.ticks
        self.moment("edge")
        nested = self.step is not None
        try:
            if self._failure is not None:
                raise CommunicationFailedError(self._failure)
            if nested or not self._reduced or self.sums.expected(self.progress.epoch):
                self._vote(Announced(Intent.EDGE, self.depth + 1), step)
        except CommunicationFailedError as error:
            self._recover(step, str(error))
            return self.progress.ticks > ticks
        self._commit(step, nested=nested)
        if not nested and not ends_pass:
            self._change_between_steps(step.can_switch)
        return True

    def end_pass(self, loop: LoopProgress, total: int, *, put_off: bool = False) -> None:
        """A loader pass has run out: leave it together, so that no rank is ever more than one step ahead.

        Args:
            loop: the pass.
            total: its samples.
            put_off: the user's code behind the loop has run already. What happens between two steps waits until that is
                part of the progress, so that whoever goes on from there, a joiner or the job another time, does not run
                it again.

        Raises:
            WorkerDismissed: as in :meth:`edge`.
        """
        passes = self.progress.passes
        while self.progress.passes == passes:
            try:
                self._vote(Announced(Intent.END_OF_PASS, self.depth, self._layout_of_buffers()))
                self.progress.passes += 1
                self._sync_buffers(self.communicator)
            except CommunicationFailedError as error:
                furthest = self._regroup(str(error))
                # Others are through: they only differ in code that this rank will run by itself.
                self.progress.passes = max(self.progress.passes, furthest)
        loop.done = True
        if self.depth == 0:
            self._left = 0
            self._put_off = lambda world_size: total >= world_size
            if not put_off:
                self._catch_up()

    def abandon_step(self, loop: LoopProgress) -> None:
        """The user's code left a pass in the middle of a step. Whether by ``break`` or by an exception shows later:
        only the former goes on, and then :meth:`settle` commits the step and ends the pass. An iterator that outlives
        its epoch has been settled already."""
        if any(step.loop is loop for step in (*self._outer, self.step) if step is not None):
            self._abandoned += 1

    def settle(self) -> None:
        """Commit steps that were left by ``break``, and end their passes."""
        while self._abandoned and self.step is not None:
            self._abandoned -= 1
            loop, total = self.step.loop, self.step.total
            self.edge(ends_pass=True)
            self.end_pass(loop, total, put_off=True)

    def _catch_up(self) -> None:
        """Do what was put off at the end of a pass."""
        can_switch, self._put_off = self._put_off, None
        if can_switch is not None:
            self._change_between_steps(can_switch)

    def check_group(self) -> None:
        """Before a step is cut: if the group was called off meanwhile, go on with the next one."""
        if self.depth == 0 and self.membership.voided:
            self._regroup("the group was called off")

    def _take_step(self) -> Step:
        if self.step is None:
            raise AssertionError("an edge without a step")
        step, self.step = self.step, self._outer.pop() if self._outer else None
        return step

    def _commit(self, step: Step, *, nested: bool) -> None:
        step.loop.position += step.count
        self.progress.ticks += 1
        self.progress.lineage = self.membership.generation
        if not nested:
            # Passes nested in the step are over with it: every step counts them from the same number again.
            del self.progress.loops[step.ordinal :]
            self._ordinal = step.ordinal
            self.shared.forget_snapshot()
            trained = self._slot_seen > 0 or self._trains
            if trained:
                self.progress.steps += 1
                self.progress.done += self.models.gain(step.scale)
            self.progress.slot = 0
            self._left = step.total - step.loop.position
            self.clock.edge(step.shape if trained else None, step.micro_steps, step.count)

    def _change_between_steps(self, can_switch: Callable[[int], bool]) -> None:
        agreement = self.agreement
        if agreement.stop or agreement.preempted:
            raise WorkerDismissed(stopped=True)
        for each in self.between_steps:
            each()
        if agreement.generation:
            generation = agreement.take_generation()
            if not self._waits_for_gradients():
                self._passage.switch(generation, can_switch)
        elif agreement.batch is not None and agreement.batch != self.shape:
            self._set_shape(agreement.batch)
        agreement.batch = None

    def _waits_for_gradients(self) -> bool:
        """Whether a planned change is put off: gradients that ``no_sync`` has left on each rank would be lost by it."""
        self._waited = self._waited + 1 if any(each.local for each in self.carried) else 0
        return 0 < self._waited <= _LONGEST_WAIT

    # -- optimizer steps ---------------------------------------------------------------------------------------

    def may_apply(self) -> bool:
        """Whether the optimizer step that user code asks for is to be applied now.

        Not within an accumulation, not after a failure, and not again when a survivor already applied it before
        this (re-drawn) step: a GAN's first optimizer may have stepped when the second's gradients were lost.
        """
        if self.applying:
            raise RuntimeError(
                "optimizer.step() failed half-way, and the error was caught: parameters and optimizer state of this "
                "worker are of no step. Let errors inside optimizer.step() leave the train function"
            )
        step = self.outermost_step
        if step is None:
            return not self.replaying  # else the state that the others hold would be stepped once more
        if self._failure is not None or not step.is_last_micro:
            return False
        self._slot_seen += 1
        if self._slot_seen <= self.progress.slot:
            return False
        self.moment("optimizer_step")
        return True

    def applied(self) -> None:
        """The optimizer step was applied."""
        if self.step is not None:
            self.progress.slot = self._slot_seen
            self.moment("after_step")

    # -- agreement ---------------------------------------------------------------------------------------------

    def trains(self) -> None:
        """A backward pass of this step has begun: it trains, even when AMP leaves its update out.

        Raises:
            RuntimeError: in a pass that only evaluates.
        """
        if self.step is not None and self.step.whole:
            raise RuntimeError(
                "backward() within a pass over whole_batches=True, which is for evaluation: towards its end some ranks "
                "have no batch. To train, leave whole_batches out; where a loss needs several samples together, make "
                "them one item of the dataset"
            )
        self._trains = True

    def reduced(self) -> None:
        """A gradient reduction of this step was completed."""
        self._reduced = True

    def fail_step(self, cause: str) -> None:
        """A collective of the step in progress failed: nothing of it will be applied here."""
        if self._failure is None:
            self._failure = cause

    @property
    def announcer(self) -> Announcer:
        """What the ranks of the present generation tell each other before collectives."""
        if self._announcer is None or self._announcer.communicator is not self.communicator:
            self._announcer = Announcer(self.communicator)
        return self._announcer

    def announce(self, what: Announced, payload: Sequence[float] = ()) -> None:
        """Tell the other ranks what comes next here; :meth:`agreed` must come before the collectives themselves.

        Raises:
            CommunicationFailedError: the group broke.
            RanksDisagreeError: what was announced before was not done.
        """
        fingerprint = 0
        if self._compares(what):
            fingerprint = self.replicas.fingerprint(self.progress.steps)
        self.announcer.start(what, self.progress.ticks, fingerprint=fingerprint, payload=payload)

    def announce_reductions(self, what: Announced, *, known: bool) -> bool:
        """Tell the other ranks that gradients are reduced next here, where that has to be said.

        Args:
            what: the reductions.
            known: all ranks have made these before, and can make no others.

        Returns:
            Whether :meth:`agreed` must be asked before their results are used.

        Raises:
            CommunicationFailedError: the group broke.
            RanksDisagreeError: what was announced before was not done.
        """
        if known and not self._compares(what):
            self.announcer.start_quietly(what, self.progress.ticks)
            return False
        self.announce(what)
        return True

    def _compares(self, what: Announced) -> bool:
        """Whether parameters are compared with this announcement."""
        at_end = what.intent is Intent.END_OF_PASS and self.depth == 0
        asked = at_end or what.intent is Intent.GRADIENTS
        return asked and self.replicas.due(self.progress.steps, at_end=at_end)

    def agreed(self) -> list[float]:
        """Wait until all ranks have announced the same; returns the sums of what rode along.

        Raises:
            CommunicationFailedError: the group broke.
            RanksDisagreeError: they have not; raised on every rank.
            ReplicasDifferError: they hold different parameters; raised on every rank.
        """
        sums = self.announcer.agree()
        self.replicas.compare(self.communicator, self.announcer.fingerprints)
        return sums

    def agree_on(self, what: Announced, payload: Sequence[float] = ()) -> list[float]:
        """Announce what comes next, and wait for the others; see :meth:`announce` and :meth:`agreed`."""
        self.announce(what, payload)
        sums = self.agreed()
        self.announcer.done()
        return sums

    def _vote(self, what: Announced, step: Step | None = None) -> None:
        added = self.sums.take(self.depth + 1)
        if step is not None and step.leaves_ranks_idle:
            self.agree_on(what)
            added = with_names_of_first_rank(self.communicator, added)
        ballot = self.agreement.vote(self.communicator, added, lambda payload: self.agree_on(what, payload))
        for key, name, value in ballot:
            sums = self.progress.sums.setdefault(key, {})
            sums[name] = sums.get(name, 0.0) + value

    # -- changes of group --------------------------------------------------------------------------------------

    def _recover(self, step: Step, cause: str) -> None:
        """A step was lost: undo what user code moved on in it, and go on with whoever is left."""
        nested, outer_lost = self.step is not None, self._failure is not None
        self.sums.undo_beyond(self.depth)
        if not nested:
            self.shared.roll_back()
            del self.progress.loops[step.ordinal :]
            self._ordinal = step.ordinal
        before = self.progress.ticks, self.progress.slot
        self._regroup(cause)
        outer_lost = outer_lost or not self._reduced  # its shares were cut for a group that is gone
        if nested and outer_lost and before == (self.progress.ticks, self.progress.slot):
            self._failure = cause  # nobody finished the surrounding step either: its own edge draws it again

    def _regroup(self, cause: str) -> int:
        if not self.elastic:
            raise CommunicationFailedError(self._explain(cause))
        return self._passage.regroup(cause, self.membership.generation)

    def _enter(self, plan: Plan, communicator: Communicator) -> int:
        try:
            return self._exchange(plan, communicator)
        except CommunicationFailedError as error:
            if not self.elastic:  # there will be no other group
                self.membership.give_up(self._explain(str(error)))
            raise

    def _exchange(self, plan: Plan, communicator: Communicator) -> int:
        """Exchange state in a freshly formed group until all ranks are bit-identical."""
        self.moment("receiving")
        exchanged = self.shared.exchange(communicator)
        self._waited = 0
        for each in self.carried:
            each.enter()
        self.replicas.begin()
        if communicator.world_size > 1:
            self.agree_on(Announced(Intent.BUFFERS, 0, self._layout_of_buffers()))
        self._sync_buffers(communicator)
        pause_s = self.clock.resume()
        self.agreement.begin()
        self._failure = None
        self._set_shape(plan.batch or self.shape)
        self.link.switched(plan.generation, pause_s)
        return exchanged.passes

    def _layout_of_buffers(self) -> int:
        return digest([sync.layout for sync in self.buffers])

    def _sync_buffers(self, communicator: Communicator) -> None:
        for sync in self.buffers:
            sync(communicator)

    def _set_shape(self, shape: BatchChoice | None) -> None:
        self.shared.shape = shape
        self.shape_changes += 1
        for callback in self.on_shape_change:
            callback()

    @property
    def replaying(self) -> bool:
        """Whether the loop's code runs only to catch up with a pass that the others are in."""
        return self._replay is not None

    def resume_point(self) -> dict[str, Any]:
        """Where a checkpoint that is taken now stands; a step whose update is in the model counts as done.

        ``left``: samples left in the pass that it was taken in; no more workers than that can go on from there.
        """
        step = self.outermost_step
        if step is None or self.failed or self.progress.slot == 0:
            left = step.total - step.loop.position if step is not None else self._left
            return self.progress.resume_point() | {"left": left}
        done = self.progress.after(step.ordinal, step.count, self.models.gain(step.scale))
        return done.resume_point() | {"left": step.total - done.loops[-1].position}

    # -- for the controller -----------------------------------------------------------------------------------

    @property
    def atomic_bsz(self) -> int:
        """Most samples that this rank takes at once in the step in progress; 0 outside steps."""
        step = self.outermost_step
        return max(step.sizes[self.rank]) if step is not None and self.rank < len(step.sizes) else 0

    def step_report(self) -> StepReport | None:
        """Rank 0's measurements since the last call; None before the first generation."""
        plan = self.membership.current
        if plan is None:
            return None
        shape, steps, step_time, grad_time = self.clock.take()
        progress = self.progress
        return StepReport(
            generation=plan.generation,
            nodes=plan.nodes,
            replicas=plan.world_size,
            shape=shape,
            steps=steps,
            step_time=step_time,
            grad_time=grad_time,
            noise=self.models.noise(),
            epoch=progress.epoch,
            epochs=progress.epochs,
            total_steps=progress.steps,
            batch_size=self.clock.batch_size,
            progress=progress.told(),
        )

    # -- the end -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The train function returned.

        Raises:
            RuntimeError: the train function never trained through an ``AdaptiveDataLoader``.
            RanksDisagreeError: another rank goes on training. It finds out as well, if that takes longer.
        """
        if not self.synced:
            raise RuntimeError(
                "train_loop_per_worker must iterate an elastic_ray.AdaptiveDataLoader inside "
                "`for epoch in elastic_ray.remaining_epochs_until(n):`, but it returned without doing so"
            )
        for check in self.before_the_end:
            check()
        if self.world_size > 1 and not self.failed and not self.membership.voided:
            self.announcer.part(Announced(Intent.FINISH), self.progress.ticks, _PARTING_WAIT_S)
