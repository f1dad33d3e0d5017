"""SHELL: one run of a train function in one process: its components, and their order when a step ends.

Only the loader's ``__next__`` and the wrapped optimizer's ``step`` may change anything. User code between these calls
never sees a change of membership, batch size or learning rate.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.adaptation.policy import Policy
from elastic_ray.batch.reports import StepReport
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.consensus import UNRECORDED
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.faults import FaultInjector
from elastic_ray.membership.messages import RankInfo
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.controller_client import ControllerClient
from elastic_ray.run.registry import HookPoint
from elastic_ray.run.run import Run
from elastic_ray.session.adaptation import Adaptation
from elastic_ray.session.group_changes import CollectiveResults, GroupChanges, UserCollectives
from elastic_ray.session.loader_passes import LoaderPasses
from elastic_ray.state.layout import check_ends, digest
from elastic_ray.state.plain_metrics import plain_metrics
from elastic_ray.state.progress import PassProgress, RunProgress
from elastic_ray.state.registered import detached
from elastic_ray.state.resume_point import ResumePoint, SavedState, StartingPoint
from elastic_ray.steps.out_of_memory import EvaluationMemoryError, is_out_of_memory
from elastic_ray.steps.random_numbers import fold_generators
from elastic_ray.stragglers.detection import StragglerConfig

if TYPE_CHECKING:
    from elastic_ray.communication.unit_group import UnitGroup


# Nearly always all ranks return at once; one that is alone with it for longer goes ahead.
_FINISHED_WAIT_S = 0.5
_SAVED_TOGETHER_WAIT_S = 60.0  # one rank may evaluate after the last epoch
_KEPT_REPORTS = 16  # where nothing is reduced, ranks do not hear what rank 0 has reported
_IGNORED = StragglerConfig()


class Session:
    """Session of a single run of a train function.

    Args:
        progress: Starting point: the start, a checkpoint's resume point, or state kept through a rerun.
        saved: States to start with; None for a fresh start.
        elastic: Whether the group may change (then the loop must use ``remaining_epochs_until``).
        explain: Returns why a collective failed in a group that cannot change, given the collective's own error.

    Attributes:
        passes, collectives: Passes of the run's loaders; collectives called by user code.
        opening_failed: This run was refused before its first step, or while one of its models was being wrapped.
        in_epochs: The loop uses ``remaining_epochs_until``.
        replaced: A later run in this process has replaced this run.
        optimizers: Watch for optimizers that step without having been wrapped.
    """

    def __init__(
        self,
        worker: str,
        membership: WorkerMembership,
        controller: ControllerClient,
        *,
        progress: RunProgress | None = None,
        saved: SavedState | None = None,
        elastic: bool = True,
        fixed_batch: bool = False,
        join_timeout_s: float = 600.0,
        regroup_timeout_s: float = 60.0,
        faults: FaultInjector | None = None,
        job: str = "local",
        expected: RankInfo | None = None,
        unit: UnitGroup | None = None,
        explain: Callable[[str], str] = str,
        start: StartingPoint | None = None,
        sizes: tuple[int, int] | None = None,
        stragglers: StragglerConfig = _IGNORED,
    ) -> None:
        self.start = start or StartingPoint()
        self.in_epochs = self.opening_failed = self.replaced = self._told_of_early_report = False
        self._steps_at_join = 0
        self._kept_reports: dict[int, Mapping[str, Any]] = {}  # by number: what rank 0 may be lost before it reports
        self._saved, self._join_timeout_s = saved, join_timeout_s
        self.run = run = Run(
            worker,
            membership,
            controller,
            progress=progress or RunProgress(),
            elastic=elastic,
            fixed_batch=fixed_batch,
            faults=faults,
            job=job,
            expected=expected or RankInfo(),
            unit=unit,
            most_workers=sizes[1] if sizes is not None else None,
            stragglers=stragglers,
        )
        self.worker, self.job, self.elastic, self.membership, self.controller = (
            worker,
            job,
            elastic,
            membership,
            controller,
        )
        self.group, self.states, self.registry, self.ledger = run.group, run.states, run.registry, run.ledger
        self.consensus, self.stragglers, self.optimizers = run.consensus, run.stragglers, run.optimizers
        self.notify, self.moment = run.notify, run.moment
        self.adaptation = Adaptation(run, sizes)
        results = CollectiveResults()
        self._changes = GroupChanges(
            run, self.adaptation, results, explain=explain, regroup_timeout_s=regroup_timeout_s
        )
        self.passes = LoaderPasses(run, self._changes, self.adaptation)
        self.collectives = UserCollectives(run, self._changes, self.passes, results)

    @property
    def synced(self) -> bool:
        """True if this worker has joined the job, which happens at its first epoch."""
        return self.run.synced

    def fail_opening(self) -> None:
        """Record that the run failed to start, so that it can be opened again, or replaced by one with a new model."""
        self.opening_failed, self.in_epochs = True, False
        self.registry.loaders.failed = True

    @property
    def progress(self) -> RunProgress:
        """Progress of the run: its epoch, passes and committed steps."""
        return self.states.progress

    @property
    def rank(self) -> int:
        """Rank of this worker in the current generation; 0 before the first."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the current generation; 1 before the first."""
        return self.group.world_size

    @property
    def preempted(self) -> bool:
        """True if the ranks have agreed to stop after the current step, so that the job resumes later."""
        return self.run.agreed.preempted and not self.run.agreed.stop

    def mark_replaced(self) -> None:
        """Record that a later run in this process has replaced this run, whose loop cannot continue."""
        self.replaced = True

    def add_policies(self, policies: Sequence[Policy]) -> None:
        """Add policies, which are called between steps.

        Raises:
            RuntimeError: Training has started.
            PolicyError: The state of a policy is not plain.
        """
        if policies and self.synced:
            raise RuntimeError("policies must be given before the first epoch, so that all workers have the same")
        self.adaptation.add(policies)

    def sync_point(self) -> None:
        """Join the job, after all models and loaders are built and before training starts.

        Raises:
            WorkerDismissed: The job ended or shrank before this worker joined.
            UnsafeStateError: A state could not be sent to another worker.
        """
        if self.synced:
            return
        self.opening_failed = False
        try:
            self._open()
        except BaseException:
            self.fail_opening()
            raise

    @property
    def has_trained(self) -> bool:
        """True if a step was committed since this worker joined."""
        return self.run.synced and self.progress.steps > self._steps_at_join

    def _open(self) -> None:
        """Join the group with the objects that the train function has built."""
        self.registry.call(HookPoint.BEFORE_FIRST_EPOCH)
        self.adaptation.register(self.states)
        if self.elastic:
            self.states.check_plain()  # here it is the user's to mend; in the middle of a change it would be too late
        self._install_saved()
        loaded = self.progress.steps if self.states.loaded else 0
        self._join_unit()
        self.run.agree_in_unit(None)  # all of it is ready
        info = self.registry.loaders.info
        if info is not None:
            info = dataclasses.replace(info, models=self.registry.models.infos)
        self.controller.ready(info, has_state=self.states.unique, loaded=loaded)
        self.moment("joining")
        self._changes.join(timeout_s=self._join_timeout_s)
        self.run.synced = True
        self._steps_at_join = self.progress.steps
        if self.registry.folds_random:
            fold_generators(self.rank, self.group.generation, self.progress.loader_steps, joined=self.states.joined)
        self.ledger.start_replay()

    def _join_unit(self) -> None:
        """Act together with the other workers in the unit from now on.

        Raises ValueError if they have different policies, measurements or strategies.
        """
        if self.run.wishes is None or self.run.unit is None:
            return
        registry, policies = self.registry, self.adaptation.runner.facts
        facts = policies, registry.monitoring.request, registry.strategies, registry.round_period
        if len(set(self.run.wishes.alike(float(digest(facts))))) > 1:
            raise ValueError(
                "all workers of a unit must give the same policy=, monitor= and strategy= to AdaptiveDataParallel, but "
                f"they differ; this worker has the policies {[name for name, _ in policies] or 'none'}, "
                f"{registry.monitoring.request} and the strategies {list(registry.strategies)}"
            )
        if self.adaptation.active or self.stragglers.shares or registry.monitoring.request.workers:
            self.run.meter.join_units(self.run.unit.gather)

    def _install_saved(self) -> None:
        """Adopt the states to start with; errors name the checkpoint that they come from."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        try:
            self.states.resume(self.adaptation.with_state(saved.states), loaded=bool(saved.path))
        except (RuntimeError, ValueError, KeyError) as error:
            if not saved.path:
                raise
            raise RuntimeError(
                f"the job has an automatic checkpoint of another model or optimizer: {error} Continue with the "
                f"model that {saved.path} was saved from, or start anew under another RunConfig(name)"
            ) from error

    def keep_state(self) -> tuple[dict[str, Any], RunProgress] | None:
        """Return the states, keyed by name, and the progress that a rerun of the train function continues from.

        Rolls back the step in progress, with the passes nested in it. Returns None if this worker has not joined, or
        was interrupted during an update.
        """
        if not self.synced or self.ledger.updating:
            return None
        step = None
        while self.ledger.depth:
            step = self.ledger.end()
        if step is not None:
            self.ledger.undo(step)
        return self.states.capture_to_keep(), self.progress

    def start_epochs(self, epochs: int | None) -> None:
        """Start the loop over remaining epochs; `epochs` is None if the loop counts them itself.

        Raises WorkerDismissed or UnsafeStateError in the same cases as :meth:`sync_point`.
        """
        self.in_epochs = True
        self.sync_point()
        self.progress.epochs = epochs

    def enter_loop(self) -> PassProgress:
        """Enter the next loader pass in this epoch; a pass that was interrupted continues at its last position.

        Raises RuntimeError if the job is elastic but its loop does not use ``remaining_epochs_until``.
        """
        if not self.synced:
            if self.elastic and not self.in_epochs:
                raise RuntimeError(
                    "an AdaptiveDataLoader must be iterated inside `for epoch in "
                    "elastic_ray.remaining_epochs_until(n):`, so that workers who join later start in the right epoch. "
                    "For a look at a batch before that, use torch's DataLoader"
                )
            self.sync_point()
        return self.passes.enter()

    def resume_point(self) -> ResumePoint:
        """Return the resume point for a checkpoint saved now; the current step counts if its update was applied."""
        return self.ledger.resume_point(self.registry.models.gain)

    def warn_of_early_report(self) -> None:
        """Warn the job's user, once, that the train function makes reports before its first epoch."""
        if not self._told_of_early_report:
            self._told_of_early_report = True
            self.notify(
                "warning",
                "the train function has called report() before its first epoch: a function that never iterates an "
                "AdaptiveDataLoader inside `for epoch in elastic_ray.remaining_epochs_until(n):` is refused at its end",
            )

    def count_report(self, *, saves: bool = False) -> int:
        """Count a call to ``report``, with a checkpoint if ``saves``, and return the call's number in the run."""
        self.run.agreed.wants_comparison |= saves
        if self.rank and self.run.agreed.is_unrecorded():
            self.run.notify_once("warning", UNRECORDED, 0)
        reports = self.progress.count_report(self.run.agreed.reports)
        self.run.agreed.reports = reports
        return reports

    def keep_report(self, metrics: Mapping[str, Any], number: int) -> None:
        """Keep what a rank other than 0 has reported under ``number`` until rank 0 is known to have reported it."""
        made = self.run.agreed.reports_of_first
        kept = [(each, told) for each, told in self._kept_reports.items() if made < each < number]
        own = {name: detached(each) for name, each in metrics.items()}
        self._kept_reports = dict([*kept[1 - _KEPT_REPORTS :], (number, own)])

    def make_missed_reports(self, before: int | None = None) -> None:
        """Make the reports that this rank kept before it became rank 0, up to number ``before``."""
        kept, self._kept_reports = self._kept_reports, {}
        for number, metrics in kept.items():
            if before is None or number < before:  # else of a step that was drawn again
                try:
                    plain = plain_metrics(metrics)
                except (TypeError, ValueError) as error:  # only rank 0's metrics need be plain
                    self.notify("warning", f"report {number} is missing if rank 0 was lost before it: {error}")
                else:
                    self.controller.report_missed(plain, self.resume_point(), number)

    def may_save(self) -> bool:
        """True if all ranks hold the same model; otherwise, request that models be made equal after the next step."""
        settled = self.registry.settled
        if not settled:
            self.run.agreed.wants_consensus = True
        return settled

    def samples_beyond_memory(self, error: BaseException) -> int:
        """Return the number of samples at once for which memory ran out; 0 if fewer samples are no way out.

        An evaluation bounds the batches of its own loader, down to those that have trained.
        """
        step = self.ledger.outermost
        if not is_out_of_memory(error) or step is None or step.whole or self.rank >= len(step.sizes):
            return 0
        if not isinstance(error, EvaluationMemoryError):
            return max(step.sizes[self.rank])
        bound = self.progress.bound_after(error.samples, self.run.least_samples())
        return error.samples if self.progress.fits <= bound < error.samples else 0

    def takes_more(self, error: BaseException) -> bool:
        """True if memory ran out in a step whose largest micro-batch on this rank exceeds an equal split among ranks.

        Ranks share an evaluation's batches equally, also within such a step.
        """
        step = None if isinstance(error, EvaluationMemoryError) else self.ledger.outermost
        return step is not None and self.rank < len(step.sizes) and max(step.sizes[self.rank]) > step.equal_bsz

    def step_report(self) -> StepReport | None:
        """Return this rank's measurements since the previous call; None before the first group."""
        run, adaptation = self.run, self.adaptation
        spec = run.group.generation_spec
        if spec is None:
            return None
        shape, steps, step_time, grad_time = run.clock.take()
        if run.clock.generation != spec.generation:  # a leaver's last steps, and those before a switch under way
            shape, steps, step_time, grad_time = None, 0, 0.0, 0.0
        progress, peak_s, first = run.states.progress, run.registry.take_peak_s(), run.registry.models.first
        tokens = run.registry.loaders.info.tokens if run.registry.loaders.info is not None else None
        return StepReport(
            generation=spec.generation,
            nodes=spec.nodes,
            replicas=spec.world_size,
            shape=shape,
            steps=steps,
            step_time=step_time,
            grad_time=grad_time,
            noise=run.registry.models.noise(),
            signal=first.signal() if first is not None else None,
            epoch=progress.epoch,
            epochs=progress.epochs,
            total_steps=progress.steps,
            batch_size=run.clock.batch_size,
            progress=progress.summary(),
            strategy=run.clock.strategy,
            uneven=run.clock.uneven,
            stragglers=(*run.stragglers.slow, *run.stragglers.senders),
            ratios=run.stragglers.ratios,
            parts=run.gpu_types.take() if not run.stragglers.uneven else (),
            held_batch=adaptation.held_batch,
            coming=adaptation.coming,
            wish=adaptation.wish,
            learning_rate_factor=first.rate_factor() if first is not None else None,
            first_step_s=run.clock.first_step_s,
            loss=run.registry.monitoring.loss,
            memory_bound=progress.memory_bound,
            backend=run.group.communicator.backend if run.group.members else "",
            mfu=peak_s * run.clock.batch_size / spec.world_size / step_time if peak_s and step_time > 0 else None,
            tokens_per_sample=tokens.per_sample if tokens is not None else None,
            found=run.registry.found_strategies,
        )

    def _announce_finished(self, wait_s: float, left: int) -> list[int]:
        """Announce that this rank is done; return the others' fingerprints if they arrive within ``wait_s``."""
        if self.run.wishes is None:
            return self.consensus.announce_finished(Announced(Intent.FINISH), wait_s, left)
        with contextlib.suppress(CommunicationFailedError):  # a rank that is gone needs no answer
            self.consensus.agree_on(Announced(Intent.FINISH))  # a unit's workers do not part by the clock
        return []

    def finish(self, *, saves: bool = False) -> bool:
        """Finish the run, after the train function has returned.

        Args:
            saves: True if the run's final state should be saved; equal on all ranks.

        Returns True if this rank can now save its part of the final state, or all of it.

        Raises:
            RuntimeError: The train function never trained through an ``AdaptiveDataLoader``.
            RanksDisagreeError: Another rank is still training. That rank also detects this, possibly later.
            ReplicasDifferError: The replicas have diverged in the last steps.
        """
        if not self.synced:
            raise RuntimeError(
                "train_loop_per_worker must iterate an elastic_ray.AdaptiveDataLoader inside "
                "`for epoch in elastic_ray.remaining_epochs_until(n):`, but it returned without doing so"
            )
        if self.rank == 0 and self.run.speaks:
            self.make_missed_reports()
        self.run.leave_group()
        self.registry.call(HookPoint.BEFORE_END)
        self.adaptation.end_train()
        if self.ledger.failed:
            return False
        alone = self.world_size == 1 or not self.registry.saves_together
        ends, wait_s = list[int](), _FINISHED_WAIT_S if alone or not saves else _SAVED_TOGETHER_WAIT_S
        if self.world_size > 1 and not self.run.voided:
            left = self.run.replicas.left_at(self.progress.loader_steps)
            ends = self._announce_finished(wait_s, left)
            check_ends(ends)
        if alone or not saves:
            return saves
        if not ends:
            self.notify("storage", f"the end of the run is not saved: other ranks have not returned after {wait_s:g} s")
            return False
        self.consensus.announcer.done()
        return self._changes.before_last_save()
