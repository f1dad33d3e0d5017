"""SHELL: the passes of a run's loaders; all ranks agree on when each step and each pass ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.consensus import RAN_OUT
from elastic_ray.consensus.intents import Announced, Intent, RanksDisagreeError, returned_early
from elastic_ray.events import EventKind
from elastic_ray.membership.messages import Member
from elastic_ray.run.run import Run
from elastic_ray.session.adaptation import Adaptation
from elastic_ray.session.group_changes import GroupChanges
from elastic_ray.state.layout import DataPlan, MergeLayout, digest
from elastic_ray.state.progress import PassProgress
from elastic_ray.steps.out_of_memory import free_caches
from elastic_ray.steps.round import StepRound
from elastic_ray.steps.step import LoaderStep

_LOST = (
    "a worker {what} in the step in which break left the loop over the loader. Code that has continued cannot draw it "
    "again, so its {count} samples are not used. A loop that is to lose none ends with its data"
)
_LOST_SUMS = (
    "a worker was lost at the end of the step in which break left the loop over the loader. The step counts, but not "
    "what accumulators were given for its {count} samples"
)


class LoaderPasses:
    """Passes of a run's loaders, and their steps."""

    def __init__(self, run: Run, changes: GroupChanges, adaptation: Adaptation) -> None:
        self._run, self._changes, self._adaptation = run, changes, adaptation
        self._deferred_change: Callable[[int], bool] | None = None
        self._asked_to_end: PassProgress | None = None
        # ended by :meth:`end_after_step` with a step that is committed
        self.ended_early: PassProgress | None = None
        # By depth: a pass, the group in which it was described, and its description.
        self._plans: dict[int, tuple[PassProgress, int, DataPlan]] = {}
        self._due: tuple[int, DataPlan | None] = 0, None  # what the present step's end compares, in which generation
        # The last pass that all ranks know to end with a round, in which group, and whether they merge the same.
        self._ends: tuple[PassProgress, int, bool] | None = None
        self._told: int | None = 0  # link of the last pass that the job has heard of
        self._stepped_in = 0  # latest generation in which a step that is within no other was committed

    def check_group(self, loader_pass: PassProgress) -> None:
        """Enter the next group, if the current group was called off, before a step is divided among ranks."""
        run = self._run
        known = run.membership if run.wishes is None else run.wishes  # what all workers of a unit know
        if known.voided and run.ledger.depth == 0:
            if run.ledger.round is not None:
                self._lose_round("the group was called off")
            else:
                self._changes.regroup("the group was called off")
        if self._changes.furthest_passes > self._run.states.progress.ended_passes:
            self._end_left_pass(loader_pass)

    def _end_left_pass(self, loader_pass: PassProgress) -> None:
        """End a pass that another rank has left by ``break``, in a lost step later than this rank's last step."""
        if self._run.ledger.depth == 0 and self._changes.furthest_passes > self._run.states.progress.ended_passes:
            loader_pass.end()
            self._run.states.progress.advance_passes(self._changes.furthest_passes)

    def compare_plan(self, loader_pass: PassProgress, facts: Callable[[], Mapping[str, Any]], *, leads: bool) -> bool:
        """Compare the facts that determine a pass's data across ranks, before its first step in each group.

        In a group that replaces a broken one, some ranks may still be within the step that this rank starts again, so
        that their announcements would not match. The facts are then compared at the end of the step. The facts of a
        pass nested in a step are compared at the end of that pass, with its announcement. Before a round (steps during
        which no rank waits for another), ranks do not wait for the comparison until the round ends.

        Returns False if the group broke during the comparison and another one was entered; the step must then be
        divided again.

        Raises:
            ReplicasDifferError: The ranks would use different samples, or a different order; raised on every rank.
            RanksDisagreeError: Another rank has returned from the train function after the same number of steps or
                fewer.
        """
        run = self._run
        depth, generation = run.ledger.depth, run.group.generation
        steps = run.states.progress.loader_steps
        for each in run.group.returned if not depth else ():  # whose training has ended
            if each.steps <= steps:
                raise RanksDisagreeError(returned_early(each.rank, each.steps, run.group.communicator.rank, steps))
        known = self._plans.get(depth)
        if run.group.world_size == 1 or (known and known[0] is loader_pass and known[1] == generation):
            return True
        plan = DataPlan(facts=facts(), joined=run.states.joined)
        self._plans[depth] = loader_pass, generation, plan
        if depth:
            return True
        if run.group.replaces_broken and self._stepped_in != generation:
            self._due = generation, plan
            return True
        try:
            if self._starts_round(leads) and run.registry.round_period > 1:
                run.consensus.announce_ahead(Announced(Intent.PLAN), plan)
            else:
                run.consensus.agree_on(Announced(Intent.PLAN), plan=plan)
        except CommunicationFailedError as error:
            self._changes.regroup(str(error))
            return False
        return True

    def start_step(self, step: LoaderStep) -> None:
        """Start a step, before its first micro-batch is yielded, and call the policies' ``before_step``."""
        run = self._run
        within = run.ledger.round is not None
        step.reports_before = max(run.states.progress.reports, run.agreed.reports)
        if run.registry.drifting and self._starts_round(step.leads):
            self._start_round(step)
        run.ledger.start(step)
        if run.ledger.depth == 1:
            if run.meter.on:
                run.meter.start_step(goes_on=within)
            if self._adaptation.active and not within:
                self._adaptation.before_step(step)

    def _starts_round(self, leads: bool) -> bool:
        """True if a round starts with the next step, because the replicas of several ranks differ by design."""
        run = self._run
        if not run.registry.drifting or run.ledger.round is not None or run.ledger.depth:
            return False
        return (leads or run.registry.may_train) and run.group.world_size > 1 and run.registry.drifts

    def _start_round(self, step: LoaderStep) -> None:
        """Start a round: the steps until the models are averaged or the pass ends."""
        run = self._run
        steps = run.registry.round_steps if step.leads else 1
        counts = step.to_come(steps + 1) if step.to_come is not None else ()
        ends, counts = 0 < len(counts) <= steps, counts[:steps]
        run.ledger.start_round(step.loader_pass, counts, len(counts) or steps, ends_pass=ends, copies=run.elastic)
        assert run.ledger.round is not None, "it has started"
        run.ledger.round.reports_before = step.reports_before
        shared = run.shares.stands and run.registry.gives_back and run.registry.may_train  # now, on all ranks
        if shared and run.ledger.trains_in_rounds and len(counts) > 1:
            run.shares.start_round(run.states.progress.loader_steps, len(counts))

    def makes_step(self, step: LoaderStep) -> bool:
        """True if this rank executes the started step itself; False if another rank does, or the round is lost."""
        run = self._run
        if run.ledger.round is None or step.taken or not run.shares.active:
            return True
        try:
            if run.shares.is_own(run.ledger.round.steps):
                return True
        except CommunicationFailedError as error:
            run.ledger.fail(str(error))
            return False
        step.give_away()
        run.meter.leave_out()
        for move_on in run.ledger.on_given:
            move_on()
        return False

    def step_of_another(self) -> tuple[int, int] | None:
        """Return (rank, step number) of a step to execute on behalf of another rank; None if there is no such step."""
        if not self._run.shares.active:
            return None
        try:
            return self._run.shares.of_another()
        except CommunicationFailedError as error:
            self._lose_round(str(error))
            return None

    def end_after_step(self) -> None:
        """End the innermost pass after the current step, once that step is committed.

        If the step is lost and drawn again, user code must make this call again; a ``break`` could not be repeated.
        """
        step = self._run.ledger.step
        assert step is not None, "a pass ends after a step"
        self._asked_to_end = step.loader_pass

    def fetched(self, fetch: Callable[[], Any]) -> Any:
        """Return the micro-batch from ``fetch``, measuring the time spent waiting for data."""
        if self._run.ledger.depth > 1:
            return fetch()
        since_s = time.perf_counter()
        batch = fetch()
        self._run.meter.waited_for_data(time.perf_counter() - since_s)
        return batch

    def enter(self) -> PassProgress:
        """Start this epoch's next loader pass and return its progress; a resumed pass keeps its position.

        Raises RuntimeError if a pass over whole batches is in progress.
        """
        self.complete()
        self._run.refuse_in_round("no loader may be iterated", "evaluate after the pass, or between epochs")
        ordinal = self._run.ledger.start_pass()
        self._catch_up()
        return self._run.states.progress.passes[ordinal]

    def end_epoch(self) -> None:
        """End the epoch: commit steps whose loop was left, end their passes and call the policies' ``after_epoch``."""
        self._run.ledger.abandoned = self._run.ledger.depth
        self.complete()
        self._adaptation.end_epoch()
        self._run.states.progress.keep_sums()
        self._run.states.progress.end_epoch()
        self._catch_up()

    def edge(
        self, loader_pass: PassProgress | None = None, *, ends_pass: bool = False, abandoned: bool = False
    ) -> bool:
        """Commit a step whose body has run; if it is lost, enter another group and draw the step's batch again.

        Args:
            loader_pass: The pass that the step belongs to; None for the innermost.
            ends_pass: True if the pass ends with this step. Actions between two steps are then postponed.
            abandoned: True if the loop was left, so that the step cannot be drawn again.

        Returns True if the step was committed, by this rank or by a survivor whose state it received.

        Raises:
            RuntimeError: Another pass was started within the step and has not ended.
            WorkerDismissed: This worker leaves at this point, or the job was stopped.
        """
        run, ledger = self._run, self._run.ledger
        if ledger.abandoned and not abandoned:
            self.complete()
        failure = ledger.failure  # of this step, not of one around it
        if run.wishes is not None:
            failure = run.agree_in_unit(failure)
        left = ledger.has_left
        step = ledger.end(loader_pass)
        asked, self._asked_to_end = self._asked_to_end, None
        ends_early = asked is step.loader_pass
        if left:
            return self._edge_alone(step, ends_early=ends_early, abandoned=abandoned)
        before = run.states.progress.loader_steps
        if run.faults is not None:
            run.moment("edge")
        nested = ledger.step is not None
        if ledger.round is not None and not nested:
            return self._edge_in_round(step, failure, ends_early, ends_pass=ends_pass, abandoned=abandoned)
        try:
            known = failure == RAN_OUT and run.agreed.ran_out  # on all ranks, by the step's own reductions
            if failure is not None and not known:
                raise CommunicationFailedError(failure)
            plan = self._due[1] if not nested and self._due[0] == run.group.generation else None
            if not known and (ledger.needs_vote or plan is not None or run.sums.expected(run.states.progress)):
                averaged = 0 if nested else run.registry.drift_layout(trained=int(ledger.trains))
                if not nested:
                    run.tally.ended = step
                self._vote(Announced(Intent.EDGE, ledger.depth + 1, averaged), step, plan)
                self._due = self._due if nested else (0, None)
            if run.agreed.ran_out and not nested:
                self._draw_in_parts(step, abandoned=abandoned)
                return False
        except CommunicationFailedError as error:
            self._recover(step, str(error), abandoned=abandoned)
            return run.states.progress.loader_steps > before
        if ends_early:
            self.ended_early = step.loader_pass
        hashes = run.tally.take(step) if not nested else None
        trained = ledger.commit(step, run.group.generation, run.registry.models.gain, hashes)
        if not nested:
            if step.leads and trained:
                run.states.progress.count_fit(max(map(max, step.sizes)))
            self._stepped_in = run.group.generation
            if self._conclude(step, trained=trained) and not (ends_pass or ends_early):
                self._changes.between_steps(step.can_switch)
        return True

    def _edge_alone(self, step: LoaderStep, *, ends_early: bool, abandoned: bool) -> bool:
        """End a step that the other ranks are not in; same result as :meth:`edge`."""
        run, ledger = self._run, self._run.ledger
        if not ledger.has_left:
            run.sums.undo_beyond(ledger.depth)
            committed = ledger.end_left(step)
            if not committed:
                self._forget_reports(step)
            if abandoned and not committed and not step.loader_pass.done:  # the others draw it again, and wait for this
                self._recover(step, "break has left the loop in a step that is drawn again", abandoned=True)
            return committed
        self._add_own()
        step.loader_pass.advance(step.count, None)
        if ends_early:
            self.ended_early = step.loader_pass
        return True

    def _edge_in_round(
        self, step: LoaderStep, failure: str | None, ends_early: bool, *, ends_pass: bool, abandoned: bool
    ) -> bool:
        """Count a step on this rank alone, and end the round after its last step; same result as :meth:`edge`."""
        run, ledger = self._run, self._run.ledger
        if failure is not None:
            if not abandoned:
                ledger.undo_sums(step)  # a loss in a pass within it has dropped the copies of the round's start
            return self._lose_round(failure, abandoned=abandoned)
        hashes = step.hashed() if step.hashed is not None else None
        ledger.commit(step, run.group.generation, run.registry.models.gain, hashes)
        assert ledger.round is not None, "the step was in it"
        if run.shares.active and (ends_early or abandoned):
            ledger.leave_rest(step, run.group.generation, run.registry.models.gain)
        if (ledger.round.left or run.shares.active) and not (ends_pass or ends_early or abandoned):
            return True
        if not self.end_round(ends_pass=ends_pass or ends_early, abandoned=abandoned):
            return False
        if ends_early:
            self.ended_early = step.loader_pass
        return True

    def end_round(self, *, ends_pass: bool = True, abandoned: bool = False) -> bool:
        """End the current round (steps between two averagings of models), if any: the ranks vote, then average models.

        Returns True if the round's steps are committed; otherwise they must be drawn again.
        """
        run, ledger = self._run, self._run.ledger
        ended = ledger.round
        if ended is None or ended.last is None:
            return True
        run.shares.end_round()
        try:
            plan = self._due[1] if self._due[0] == run.group.generation else None
            if ledger.needs_vote or plan is not None or run.sums.expected(run.states.progress):
                run.tally.ended = ended
                averaged = run.registry.drift_layout(trained=run.states.progress.steps if ended.trained else 0)
                layout = None
                if ended.ends_pass:
                    averaged = digest((averaged, run.registry.buffer_layout))
                    layout = run.registry.merge_layout if plan is None else None
                if ended.trained and run.registry.round_period > 1:
                    run.registry.prepare_averages(ends_pass=ended.ends_pass)
                self._vote(Announced(Intent.EDGE, 1, averaged), ended.last, plan or layout)
                self._due = 0, None
                if ended.ends_pass and ended.trained:  # else no average holds a rank that has the vote's result back
                    self._ends = ended.loader_pass, run.group.generation, layout is not None and layout.alike
        except CommunicationFailedError as error:
            return self._lose_round(str(error), abandoned=abandoned)
        ledger.end_round(run.tally.take(ended))
        if ended.trained and ended.last.leads:
            run.states.progress.count_fit(max(map(max, ended.last.sizes)))
        self._stepped_in = run.group.generation
        if self._conclude(ended.last, trained=ended.trained, ended=ended) and not (ends_pass or ended.ends_pass):
            self._changes.between_steps(ended.last.can_switch)
        return True

    def _lose_round(self, cause: str, *, abandoned: bool = False) -> bool:
        """Continue with the remaining workers after a round was lost; return True if others have committed it."""
        run, ledger = self._run, self._run.ledger
        lost = ledger.round
        assert lost is not None, "a round is in progress"
        run.sums.undo_beyond(0)
        run.shares.end_round(lost=True)
        if abandoned:  # code that has continued cannot draw it again: the steps count as they are
            ledger.end_round(None)
            self._end_alone(lost.loader_pass)
            run.states.lacks_sums = True
            self._changes.regroup(cause)
            if run.states.lacks_sums:  # no other rank has them
                run.notify_once("warning", _LOST_SUMS.format(count=lost.samples), run.group.generation)
            return True
        ledger.lose_round()
        try:
            self._changes.regroup(cause)
        except BaseException:
            run.states.roll_back()
            raise
        committed = lost.loader_pass.position > lost.position
        if not committed:
            run.agreed.forget_reports(lost.reports_before)
        return committed

    def _conclude(self, step: LoaderStep, *, trained: bool, ended: StepRound | None = None) -> bool:
        """Average models after a committed step, and record its time; False if another group had to be entered.

        Args:
            ended: The round that ends with the step; None if the step is committed by itself.
        """
        steps, samples = (1, step.count) if ended is None else (ended.steps, ended.samples)
        run = self._run
        if trained:
            try:
                run.registry.after_step()
            except CommunicationFailedError as error:
                self._changes.regroup(str(error))
                return False
        uneven = run.group.mixed or (bool(run.stragglers.slow) and run.stragglers.uneven)
        shape = step.shape if trained else None
        run.clock.edge(shape, step.micro_steps, step.count, run.registry.strategy_key, uneven=uneven, steps=steps)
        if run.meter.on:
            run.meter.end_step()
            if trained:
                run.stragglers.after_step(run.gpu_types.comparable(step.work) if run.group.mixed else step.work)
        if trained and run.group.mixed:
            run.gpu_types.after_step(step.sizes)
        if trained and self._adaptation.active:
            self._adaptation.after_step(step, samples)
        return True

    def end_pass(
        self,
        loader_pass: PassProgress,
        total: int,
        *,
        put_off: bool = False,
        abandoned: bool = False,
        rest: Callable[[], int | None] = lambda: None,
    ) -> None:
        """End a loader pass on all ranks together, so that no rank is ever more than one step ahead.

        Args:
            put_off: True if user code after the loop has already run. Actions between two steps are postponed until the
                progress includes that code, so that a joiner, or the job when resumed, does not run it again.
            rest: Returns the hashes of the samples that the pass leaves out; None if the pass is not meant to use each
                of its samples once.

        Raises WorkerDismissed in the same cases as :meth:`edge`.
        """
        self._end_left_pass(loader_pass)
        if loader_pass.done:  # another rank has ended it, and this one has taken over its state
            self._leave_pass(loader_pass, total, put_off=put_off)
            return
        run, ended = self._run, self._run.states.progress.ended_passes
        early, self.ended_early = abandoned or self.ended_early is loader_pass, None
        while self._run.states.progress.ended_passes == ended and not run.ledger.has_left:
            lost, members = run.ledger.lost_within(waits=self._waits), run.group.members
            try:
                alike = self._agree_on_end(loader_pass)
                self._run.states.progress.end_pass()
                loader_pass.end()  # now, for a joiner that is sent this state: it would wait at the end that is over
                self._prove(loader_pass, total, rest)
                run.moment("end_of_pass")
                run.registry.sync_buffers(run.group.communicator)
                if self._run.ledger.depth == 0:
                    run.registry.collapse(alike=alike)
            except CommunicationFailedError as error:
                if early and run.ledger.depth == 0:
                    self._end_alone(loader_pass)
                elif early and run.ledger.abandoned == run.ledger.depth:
                    self._give_up(None, str(error))
                    break
                elif early:
                    run.ledger.leave_steps(0)
                self._regroup(str(error))
                run.ledger.resume(lost, str(error), all_stay=self._all_stay(members))
        self._leave_pass(loader_pass, total, put_off=put_off)

    def _agree_on_end(self, loader_pass: PassProgress) -> bool:
        """Agree that a pass ends, unless its last round's vote did; True if merge layouts are known to be equal."""
        run, depth = self._run, self._run.ledger.depth
        known, self._ends = self._ends, None
        if known is not None and known[0] is loader_pass and known[1] == run.group.generation and run.registry.drifts:
            return known[2]  # once averaging is over, replicas are compared as at any end
        described = self._plans.get(depth) if depth else None
        plan = described[2] if described is not None and described[0] is loader_pass else None
        layout = run.registry.merge_layout if not depth and run.group.world_size > 1 else None
        self._vote(Announced(Intent.END_OF_PASS, depth, run.registry.buffer_layout), plan=plan or layout)
        return layout is not None and layout.alike

    def _prove(self, loader_pass: PassProgress, total: int, rest: Callable[[], int | None]) -> None:
        """Add a proof of a training pass whose end all ranks have agreed on, if the hashes of its samples are known."""
        if loader_pass.hashed is None or not loader_pass.position or self._run.ledger.depth:
            return
        progress = self._run.states.progress
        facts = {"epoch": progress.epoch, "steps": progress.steps, "samples": loader_pass.position, "of": total}
        progress.prove({**facts, "hash": loader_pass.hashed, "rest": rest()})

    def _end_alone(self, loader_pass: PassProgress) -> None:
        """End a pass before its last sample after the group was lost, so that no joiner resumes it."""
        loader_pass.end()
        self._run.states.progress.end_pass()

    def _leave_pass(self, loader_pass: PassProgress, total: int, *, put_off: bool) -> None:
        """Leave a pass that is known on all ranks to have ended."""
        run, facts = self._run, self._run.states.progress.last_pass
        # Told by whichever is rank 0 by now: the rank that was to tell it may be lost.
        if facts and facts["link"] != self._told and run.elastic and run.group.rank == 0:
            self._told = facts["link"]
            text = f"epoch {facts['epoch']}: {facts['samples']} of {facts['of']} samples were used"
            run.notify(EventKind.PASS.value, text, {"proof": dict(facts), "number": facts["link"]})
        run.ledger.end_pass(loader_pass)
        if self._run.ledger.depth == 0:
            self._deferred_change = lambda world_size: total >= world_size
            if not put_off:
                self._catch_up()

    def complete(self) -> None:
        """Commit each step whose loop was left by ``break``, and end its pass."""
        while (step := self._run.ledger.pop_abandoned()) is not None:
            loader_pass, total, ended = step.loader_pass, step.total, self._run.states.progress.ended_passes
            self.edge(ends_pass=True, abandoned=True)
            if self._run.states.progress.ended_passes == ended:
                self.end_pass(loader_pass, total, put_off=True, abandoned=True)
            else:
                self._leave_pass(loader_pass, total, put_off=True)

    def _catch_up(self) -> None:
        """Carry out the actions that were postponed at the end of a pass."""
        can_switch, self._deferred_change = self._deferred_change, None
        if can_switch is not None:
            self._changes.between_steps(can_switch)

    def _vote(
        self, what: Announced, step: LoaderStep | None = None, plan: DataPlan | MergeLayout | None = None
    ) -> None:
        """Agree in a separate collective, and add up all ranks' contributions to accumulators."""
        run = self._run
        added = run.sums.of(run.ledger.depth + 1)
        if step is None or not step.leaves_ranks_idle:
            sums = run.consensus.vote(what, added, plan=plan)
        else:
            join = run.registry.join if step.is_idle(run.group.communicator.rank) else None
            sums = run.consensus.vote(what, added, some_are_idle=True, join=join, plan=plan)
        run.sums.undo_beyond(run.ledger.depth)
        if not run.agreed.ran_out:  # else the step is drawn again
            run.states.progress.add_sums(sums if run.unit is None else run.unit.over_shards(sums))

    def _add_own(self) -> None:
        """Count this rank's own contributions to sums in the step that has ended, for code that only this rank runs."""
        depth, progress = self._run.ledger.depth, self._run.states.progress
        for key, sums in self._run.sums.of(depth + 1).items():
            progress.add_sums((key, name, value) for name, value in sums.items())
        self._run.sums.undo_beyond(depth)

    @property
    def _waits(self) -> bool:
        """True if gradients, or contributions to accumulators, from a surrounding step have not been counted yet."""
        return self._run.registry.gradients_wait or self._run.sums.wait(self._run.ledger.depth)

    def _all_stay(self, members: Sequence[Member]) -> bool:
        """True if all ``members`` of an earlier group are in the present one."""
        present = {each.worker for each in self._run.group.members}
        return present.issuperset(each.worker for each in members)

    def _recover(self, step: LoaderStep, cause: str, *, abandoned: bool) -> None:
        """Recover from a lost step: undo what user code changed in it, and continue with the remaining workers.

        Code that has left a nested loop by ``break`` cannot draw its step again, and a joining worker cannot reach the
        position of that code: the surrounding step is drawn again, or given up if its loop was left as well.
        """
        run, ledger = self._run, self._run.ledger
        if abandoned and ledger.abandoned == ledger.depth:
            self._give_up(step, cause)
            return
        if abandoned:
            ledger.leave_steps(0)
            self._changes.regroup(cause)
            self._add_own()
            return
        run.sums.undo_beyond(ledger.depth)
        progress = run.states.progress
        lost, members = ledger.undo(step, waits=self._waits), run.group.members
        steps, reports = progress.loader_steps, progress.reports
        progress.reports = min(reports, step.reports_before)  # for those who join, and make these reports, too
        self._changes.regroup(cause)
        if (progress := run.states.progress).loader_steps > steps:  # others have committed the step
            progress.reports = max(progress.reports, reports)
        else:
            self._forget_reports(step)
        ledger.resume(lost, cause, all_stay=self._all_stay(members))

    def _forget_reports(self, step: LoaderStep) -> None:
        """Give the reports that user code makes when it draws a lost step again the numbers of those that it made."""
        progress = self._run.states.progress
        progress.reports = min(progress.reports, step.reports_before)
        self._run.agreed.forget_reports(step.reports_before)

    def _draw_in_parts(self, step: LoaderStep, *, abandoned: bool) -> None:
        """Undo a step where a worker ran out of memory, and draw its batch again in smaller micro-batches."""
        run = self._run
        run.agreed.ran_out = False
        run.sums.undo_beyond(run.ledger.depth)
        run.ledger.undo(step)
        run.ledger.clear_failure()
        free_caches()
        run.bound_memory(step)
        if not abandoned:
            self._forget_reports(step)
        else:
            self._end_alone(step.loader_pass)
            run.notify("warning", _LOST.format(what="ran out of memory", count=step.count))

    def _give_up(self, step: LoaderStep | None, cause: str) -> None:
        """Give up a lost step and all surrounding steps, whose loops were left: end the outermost step's pass.

        The outermost step is committed if the model contains its update.

        Args:
            step: The step that was lost; None if the end of a pass within the steps that were left was lost.
        """
        run, ledger = self._run, self._run.ledger
        run.sums.undo_beyond(0)
        count = step.count if step is not None else 0
        while ledger.pop_abandoned() is not None:
            step = ledger.end()
            count += step.count
        assert step is not None, "a step was left"
        before = run.states.progress.loader_steps
        if run.states.progress.optimizers_stepped:
            ledger.commit(step, run.group.generation, run.registry.models.gain)
            run.states.lacks_sums = True
        else:
            ledger.undo(step)
        self._end_alone(step.loader_pass)
        self._regroup(cause)
        lost = _LOST if run.states.progress.loader_steps == before else _LOST_SUMS
        # Not all ranks come by here: one may have been a step behind, see :meth:`_end_left_pass`.
        if lost is _LOST or run.states.lacks_sums:  # else another rank has them
            run.notify_once("warning", lost.format(what="was lost", count=count), run.group.generation)

    def _regroup(self, cause: str) -> None:
        """Enter a new group, where other ranks may already have ended the passes that this rank ends by itself."""
        self._run.states.progress.advance_passes(self._changes.regroup(cause))
