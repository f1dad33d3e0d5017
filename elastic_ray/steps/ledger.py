"""Ledger of one rank's steps: the current step, the committed steps, and what to undo if a step is lost (pure)."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elastic_ray.state.progress import BITS, PassProgress, RunProgress
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.steps.drawn_batches import DrawnBatches
from elastic_ray.steps.replay import Replay
from elastic_ray.steps.round import StepRound
from elastic_ray.steps.step import LoaderStep

if TYPE_CHECKING:
    from elastic_ray.state.shared_state import SharedState

# Sums of hashes travel in three parts of 11 bits: over 8192 ranks these are exact in float32.
_PARTS, _WIDTH = 3, 11
_MASK = (1 << _WIDTH) - 1
_LEFT = "the other ranks are not in this step any more"


@dataclasses.dataclass(frozen=True, slots=True)
class LostStep:
    """Facts about a lost step that are needed to resume in the next group."""

    nested: bool  # whether it lies within a step of another pass
    outer_lost: bool  # whether that one has failed as well, or its gradients wait for an update: they may be gone
    # where the outermost pass is, and optimizers stepped in its step, if any for its own samples; a pass within it may
    # be a step behind
    before: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LeftSteps:
    """Steps whose remaining code this rank runs alone, because the other ranks are not in them."""

    depth: int  # of the steps that all ranks are in
    position: int  # of the outermost step left, in its pass
    updates_before: int  # that step's
    sums: dict[
        tuple[int, int], dict[str, float]
    ]  # of accumulators, for code that runs on; a lost round takes them back
    around: tuple[str | None, int] = (None, 0)  # as the ledger's, once they have ended
    progress: RunProgress | None = None  # of the group that was entered meanwhile


class StepLedger:
    """Record of one rank's current step: what is committed, and what to undo if the step is lost.

    Args:
        moment: Called with the name of each moment in the run, for scripted faults; None without such faults.
    """

    def __init__(self, state: SharedState, *, moment: Callable[[str], None] | None = None) -> None:
        self.state, self._moment = state, moment
        # the innermost step that user code is in, None between steps; one left by `break` is still to be committed
        self.step: LoaderStep | None = None
        self.round: StepRound | None = None  # that the outermost step is in; None where each step is voted on
        # the training step in progress, also while an evaluation pass runs inside it
        self.outermost: LoaderStep | None = None
        self.depth = 0  # loader passes that are in the middle of a step (a nested evaluation makes it 2)
        self.failure: str | None = None  # why the step in progress is lost; None where it is not
        self.failed = False  # whether the step in progress is lost and will be drawn again
        self.trains_in_rounds = False  # the last round in this group has trained
        # called for each own step of a round that another rank makes: what the loop's code would have moved on
        self.on_given: list[Callable[[], None]] = []
        self._inner: LoaderStep | None = None
        self._outer: list[LoaderStep] = []
        self.next_ordinal = 0  # ordinal that the next loader pass of this epoch would get
        self._in_epoch = False
        self.abandoned = 0  # steps that user code has left, and that are to be committed
        self._samples_left = 0
        self._failure: str | None = None
        # Why outer steps are lost while a pass within them continues, and how many are.
        self._around: tuple[str | None, int] = (None, 0)
        self.reduced = False  # a reduction of the outermost step's own gradients has completed
        self._left: _LeftSteps | None = None
        self._trains = False
        self._updates_asked = 0
        self.updating = False  # an optimizer step has started; if it fails half-way, this rank's state is inconsistent
        self.repeats_update = False  # the update last asked for was applied before its step was lost
        self._counts_one = False
        self._replay: Replay | None = None
        self.drawn = DrawnBatches()

    @property
    def accumulating(self) -> bool:
        """True if the current micro-step, or a surrounding one, leaves its gradients to a later one in the step."""
        outer, step = self.outermost, self.step
        if outer is None or step is None or self.abandoned >= self.depth:
            return False
        return not (outer.is_last_micro and step.is_last_micro)

    @property
    def epochs_done(self) -> float:
        """Number of epochs trained so far, including the completed fraction of the current epoch."""
        step = self.outermost
        fraction = step.loader_pass.position / step.total if step is not None and step.total else 0.0
        return self.state.progress.epoch + fraction

    @property
    def initial_steps(self) -> int:
        """Number of steps at the initial batch size with the same number of samples as this step; 1 outside steps.

        Over a pass, these numbers sum to the number of steps at the initial batch size, however the batch size changes.
        """
        step = self.outermost
        if step is None or self._counts_one or self.abandoned >= self.depth:
            return 1
        begin, first = step.loader_pass.position, step.init_batch_size
        return -(-(begin + step.count) // first) - -(-begin // first)

    @contextmanager
    def counting_one(self) -> Iterator[None]:
        """Set ``initial_steps`` to 1 within the context, for schedulers stepped once per epoch, in its last step."""
        self._counts_one = True
        try:
            yield
        finally:
            self._counts_one = False

    @property
    def accumulator_scope(self) -> int:
        """Epoch that an accumulator made now belongs to; -1 before the first epoch."""
        return self.state.progress.epoch if self._in_epoch else -1

    def number_in_step(self, place: str) -> int | None:
        """Return an unused number for an accumulator that code at ``place`` makes within a step; None between steps.

        The number depends on the steps committed before, the positions of nested passes, the place in the code, and how
        often the step has reached it. A step that is drawn again therefore gets the same numbers, whichever
        accumulators survived its loss, and so does a worker that has joined since.
        """
        steps = (*self._outer, self._inner)[: max(self.depth - self.abandoned, 0)]
        first, last = self.outermost, steps[-1] if steps else None
        if first is None or last is None:  # code after `break` is also run by workers that join later
            return None
        outer = first if self.round is None else self.round
        within = outer if last is first else last
        nested = [(each.ordinal, each.loader_pass.position) for each in steps[1:] if each is not None]
        at = f"{nested} {place}"
        within.made_at[at] = times = within.made_at.get(at, 0) + 1
        return (outer.loader_steps + 1) << 32 | zlib.crc32(f"{at} {times}".encode())

    def start_epoch(self) -> None:
        """Restart the numbering of loader passes at a new epoch."""
        self._in_epoch = True
        self.next_ordinal = 0

    def start_replay(self, *, between_epochs: bool = False) -> None:
        """Start to replay user code up to the other ranks' position; the received state already has its effects.

        Args:
            between_epochs: True to replay up to the start of the next pass, False up to the other ranks' position.
        """
        if between_epochs and self.replays_passes:
            return
        needed = between_epochs or Replay.needed(self.state.progress)
        self._replay = Replay(self.state, between_epochs=between_epochs) if needed else None

    @property
    def replaying(self) -> bool:
        """True while the loop's code runs only to catch up with the other ranks, without affecting shared state."""
        return self._replay is not None

    @property
    def replays_passes(self) -> bool:
        """True during a replay (rerun of user code to catch up) that has not reached the other ranks' latest pass."""
        return self._replay is not None and self._replay.before_pass

    def reach_collective(self, number: int) -> None:
        """End the replay if user code has reached collective ``number``, where the other ranks are waiting."""
        if self._replay is not None and self._replay.reach_collective(number):
            self._replay = None

    def start_pass(self) -> int:
        """Start the epoch's next loader pass; return its number in the epoch.

        Raises RuntimeError if a pass over whole batches is in progress.
        """
        if self._inner is not None and self._inner.whole:
            raise RuntimeError(
                "no loader may be iterated within a pass over whole_batches=True: towards its end some ranks have no "
                "batch there, and would miss that loop; iterate one after the other"
            )
        if self._inner is None:
            self.drawn.start_pass()
        ordinal, self.next_ordinal = self.next_ordinal, self.next_ordinal + 1
        if self._replay is not None and self._replay.reach_pass(ordinal):
            self._replay = None
        self.state.progress.start_pass(ordinal)
        return ordinal

    def end_pass(self, ended: PassProgress) -> None:
        """Mark the progress ``ended`` of a loader pass as done, after all ranks have left the pass."""
        ended.end()
        if self.depth == 0:
            self._samples_left = 0

    def abandon(self, left: PassProgress) -> None:
        """Record that user code left the pass ``left``, and all passes within it, by ``break`` or an exception."""
        for around, step in enumerate((*self._outer, self._inner)):
            if step is not None and step.loader_pass is left:
                self.abandoned = max(self.abandoned, self.depth - around)
                self._update()

    def pop_abandoned(self) -> LoaderStep | None:
        """Return the innermost abandoned step, which must now be committed; None if no abandoned step is left."""
        if not self.abandoned or self._inner is None:
            return None
        self.abandoned -= 1
        self._update(left=0)
        return self._inner

    def start_round(
        self, loader_pass: PassProgress, counts: Sequence[int], steps: int, *, copies: bool, ends_pass: bool = False
    ) -> None:
        """Start a round of ``steps`` local steps, which the ranks commit together after averaging their models.

        Args:
            counts: Number of samples in each step; empty if unknown.
            copies: Whether to copy the state so that the round can be undone; a group that cannot change needs no copy.
            ends_pass: Whether the pass ends with the round.
        """
        if copies:
            self.state.start_round()
        self.round = StepRound(
            loader_pass, loader_pass.position, self.state.progress.loader_steps, counts, steps, ends_pass
        )

    def leave_rest(self, step: LoaderStep, generation: int, gain: Callable[[float], float]) -> None:
        """Count the remaining steps of the round as committed after the loop was left, even if no rank executes them.

        All ranks thus leave the round at the same point. The samples that were used are then unknown.
        """
        if self.round is not None:
            for count in self.round.counts[self.round.steps :]:
                self.round.loader_pass.advance(count, None)
                self.state.progress.commit(generation)
                if self.round.trained:
                    self.state.progress.commit_training(gain(step.scale))
            self.round.leave()

    def end_round(self, hashes: int | None) -> None:
        """End the round that all ranks have committed; ``hashes`` is the sum of its sample hashes, None if unknown."""
        if self.round is not None:
            self.round.loader_pass.advance(0, hashes)
            self.trains_in_rounds = self.round.trained
            self.round = None
            self.state.end_round()

    def lose_round(self) -> None:
        """Reset progress to the start of the round; the model is restored if the new group has not committed it."""
        self.round = None
        self.state.lose_round()

    def start(self, step: LoaderStep) -> None:
        """Start a step, before its first micro-batch is handed out."""
        if self._inner is not None:
            self._around = (self._failure, self.depth) if self._failure is not None else self._around
            self._outer.append(self._inner)
            step.updates_before = self._updates_asked
            self.state.snapshot(len(self._outer))
            if self._inner.sums_before is None:
                self._inner.sums_before = copy.deepcopy(self.state.progress.sums)
        else:
            self._updates_asked = 0
            self._failure, self._around = None, (None, 0)
            self.reduced = self._trains = False
            step.loader_steps = self.state.progress.loader_steps
            self.state.snapshot()
        self._inner = step
        self._update()

    def _update(self, *, left: int | None = None) -> None:
        """Update cached attributes after steps have started or ended, or a failure has changed."""
        outer, step = self._outer, self._inner
        self.outermost = outer[0] if outer else step
        self.depth = len(outer) + (step is not None)
        within = self.depth - (self.abandoned if left is None else left)
        self.step = (*outer, step)[max(within - 1, 0)] if within < self.depth else step
        cause, steps = self._around
        self.failure = self._failure if self._failure is not None or within > steps else cause
        self.failed = self.failure is not None

    def end(self, expected: PassProgress | None = None) -> LoaderStep:
        """End the innermost step, whose body has run; return it, to be committed or undone.

        Args:
            expected: The pass that the step must belong to; None for the innermost.

        Raises RuntimeError if another pass was started within the step and has not ended, or if an optimizer step was
        not completed.
        """
        if self.updating:
            self._check_updated()
        if expected is not None and self._inner is None:
            raise RuntimeError(
                "an iterator over an AdaptiveDataLoader belongs to the epoch in which it was made, and that epoch has "
                "ended: call iter(loader) again in each epoch"
            )
        if expected is not None and self._inner is not None and self._inner.loader_pass is not expected:
            raise RuntimeError(
                "loops over AdaptiveDataLoaders may be nested but not interleaved, as in zip(loader_a, loader_b): "
                "use one loader over a dataset that yields both items"
            )
        if self._inner is None:
            raise AssertionError("an edge without a step")
        step, self._inner = self._inner, self._outer.pop() if self._outer else None
        self._update()
        return step

    @property
    def needs_vote(self) -> bool:
        """True if the step that has just ended had no collective that could carry the ranks' vote."""
        return self._inner is not None or not self.reduced

    @property
    def trains(self) -> bool:
        """True if the outermost step, in progress or just ended, has trained."""
        return self._updates_asked > 0 or self._trains

    def commit(
        self, step: LoaderStep, generation: int, gain: Callable[[float], float], hashes: int | None = None
    ) -> bool:
        """Count a step that has ended: its samples and, if it trained, its optimizer step.

        Args:
            generation: Current generation, recorded as the last step's generation.
            gain: Returns the statistical progress of a step at a given scale (global / initial batch size).
            hashes: Sum of the step's sample index hashes (in a round, only this rank's); None if unknown.

        Returns True if the step trained; always False for a step nested in another.
        """
        within = self.round if self._inner is None else None
        if not step.taken:
            step.loader_pass.advance(step.count, hashes if within is None or hashes is None else 0)
            self.state.progress.commit(generation)
        if self._inner is not None:
            return False
        # Passes nested in the step are over with it: every step counts them from the same number again.
        self._discard_nested(step)
        trained = self._updates_asked > 0 or self._trains or (step.given and self.trains_in_rounds)
        self.state.discard_snapshot()
        if within is not None:
            within.add(step, hashes, trained=trained)
        if trained and not step.taken:
            self.state.progress.commit_training(gain(step.scale))
            if step.leads and step.weighed and (weight := step.counted) is not None:
                self.state.progress.count_weights(weight, step.count)
        self.state.progress.count_optimizers(0)
        self._samples_left = step.samples_left
        if self.drawn.looks:
            self.drawn.end_step(trained=trained)
        return trained

    def undo(self, step: LoaderStep, *, waits: bool = False) -> LostStep:
        """Undo a lost step: restore state that user code changed in it. Call :meth:`resume` with the result afterwards.

        Args:
            waits: True if accumulated gradients, or sums, from the surrounding step have not been applied yet.
        """
        lost = self.lost_within(waits=waits)
        self.state.roll_back(self.depth)
        self.undo_sums(step)
        if lost.nested:
            self._updates_asked = step.updates_before
        else:
            self._discard_nested(step)
        return lost

    def undo_sums(self, step: LoaderStep) -> None:
        """Restore the accumulators' sums from before the steps nested in a lost step, which are executed again."""
        if step.sums_before is not None:
            self.state.progress.sums = step.sums_before

    def lost_within(self, *, waits: bool) -> LostStep:
        """Return the facts about a loss in a pass, for :meth:`resume`; ``waits`` is as in :meth:`undo`."""
        return LostStep(self._inner is not None, waits or self._around[1] > 0, self._place)

    def resume(self, lost: LostStep, cause: str, *, all_stay: bool = True) -> None:
        """Resume in the group entered after :meth:`undo`; a surrounding step that no rank finished is also drawn again.

        So is one that a rank can no longer finish, whose part of the sums would be missing. The nested pass continues
        first, so that user code gets its result. The surrounding step fails with ``cause`` only after that.

        Args:
            all_stay: True if all ranks of the lost group are in the present one.
        """
        self.reduced |= lost.nested and self._place[1] > 0  # or another rank's has, whose update is received
        outer_lost = lost.outer_lost or not self.reduced  # its shares were cut for a group that is gone
        if lost.nested and (not all_stay or (outer_lost and lost.before == self._place)):
            if self._left is None:
                self._around = cause, self.depth
            elif self._left.depth:  # at depth 0 no step around it can fail
                self._left = dataclasses.replace(self._left, around=(cause, self._left.depth))
            self._update()

    @property
    def _place(self) -> tuple[int, int]:
        step, progress = self.outermost, self.state.progress
        stepped = progress.optimizers_stepped if progress.stepped_samples else 0
        return step.loader_pass.position if step is not None else 0, stepped

    def _discard_nested(self, step: LoaderStep) -> None:
        self.state.progress.discard_passes(step.ordinal)
        self.next_ordinal = step.ordinal

    def mark_training(self) -> None:
        """Mark the step as training when backward starts, even if AMP skips its update.

        Raises RuntimeError if the pass is for evaluation only.
        """
        if self.step is not None and self.step.whole:
            raise RuntimeError(
                "backward() within a pass over whole_batches=True, which is for evaluation: towards its end some ranks "
                "have no batch. To train, leave whole_batches out; where a loss needs several samples together, make "
                "them one item of the dataset"
            )
        self._trains = True

    def fail(self, cause: str) -> None:
        """Mark the current step as lost for this ``cause`` after a collective failed, so that no update is applied."""
        if self._failure is None:
            self._failure = cause
            self._update()

    def lose_by(self, error: Exception) -> None:
        """Mark the current step as lost for this error of a collective; outside steps, raise the error."""
        if self.step is None:
            raise error
        self.fail(str(error))

    def clear_failure(self) -> None:
        """Clear the failure when a new group is entered; until all its ranks have trained, they share no steps."""
        self.trains_in_rounds = False
        self._failure, self._around = None, (None, 0)
        if self._left is not None:
            self._failure = _LEFT
            self._left = dataclasses.replace(self._left, progress=copy.deepcopy(self.state.progress))
            self.state.progress.sums = self._left.sums
            self.state.snapshot(self._left.depth)
        self._update()

    @property
    def depth_in_group(self) -> int:
        """Number of nested passes whose current step this rank shares with the other ranks; -1 during a replay."""
        return -1 if self.replaying else self.depth if self._left is None else self._left.depth

    @property
    def step_in_group(self) -> int:
        """Committed steps before the outermost step, or its round, that this rank shares with others; -1 for none."""
        outer = self.round or self.outermost
        return outer.loader_steps if outer is not None and self.depth_in_group > 0 else -1

    @property
    def updates_in_group(self) -> int:
        """Optimizer steps that user code has asked for in the outermost step, up to where this rank is with others."""
        return self._updates_asked if self._left is None else self._left.updates_before

    def follow(self, updates: int) -> None:
        """Continue after ``updates`` optimizer steps of the outermost step, as the rank whose state was received."""
        if self._left is None:
            self._updates_asked = updates
        else:
            self._left = dataclasses.replace(self._left, updates_before=updates)

    @property
    def has_left(self) -> bool:
        """True in a step whose remaining code this rank runs alone, because the other ranks are not in it."""
        return self._left is not None and self.depth > self._left.depth

    def leave_steps(self, depth: int) -> None:
        """Leave the steps nested deeper than ``depth`` during a group change; their code continues without effect."""
        step = (*self._outer, self._inner)[depth]
        assert step is not None, "this rank is in more steps than the others"
        sums = copy.deepcopy(self.state.progress.sums) if self._left is None else self._left.sums
        if not depth and self.round is not None:
            self.lose_round()
        elif self._left is None or self._left.depth > depth:
            self.state.roll_back(depth)
        self.undo_sums(step)
        self._discard_nested(step)
        self._left = _LeftSteps(
            depth=depth, position=step.loader_pass.position, updates_before=step.updates_before, sums=sums
        )

    def end_left(self, step: LoaderStep) -> bool:
        """End a step that this rank had left, and adopt the group's progress; True if others committed the step."""
        left, self._left = self._left, None
        assert left is not None and left.progress is not None, "a group was entered"
        self.state.roll_back(left.depth)
        self.state.start_from(left.progress)
        self._discard_nested(step)
        self._updates_asked = left.updates_before
        self._failure, self._around = None, left.around
        self._update()
        return step.loader_pass.position > left.position

    def may_apply(self) -> bool:
        """True if the optimizer step that user code requests must be applied now.

        False during accumulation, after a failure (including one in a surrounding step), and if a survivor had already
        applied the optimizer step before this step was drawn again: a GAN's first optimizer may have stepped when the
        second one's gradients were lost.
        """
        if self.updating:
            self._check_updated()
        outer, step, self.repeats_update = self.outermost, self.step, False
        if outer is None or step is None:
            return not self.replaying  # else the state that the others hold would be stepped once more
        if not (outer.is_last_micro and step.is_last_micro):
            return False
        self._updates_asked += 1  # also of a lost step: its later updates have these numbers on all ranks
        if self.failed or self._around[1]:
            return False
        self.repeats_update = self._updates_asked <= self.state.progress.optimizers_stepped
        if self.repeats_update:
            return False
        if self._moment is not None:
            self._moment("optimizer_step")
        return True

    def _check_updated(self) -> None:
        if self.updating:
            raise RuntimeError(
                "optimizer.step() failed half-way, and the error was caught: this worker's parameters and optimizer "
                "state belong to no step. Let errors inside optimizer.step() leave the train function"
            )

    def applied(self) -> None:
        """Record that the optimizer step was applied, or permanently skipped."""
        self.updating = False
        if (step := self.outermost) is not None:
            progress = self.state.progress
            before = progress.stepped_samples if progress.optimizers_stepped else 0
            progress.count_optimizers(self._updates_asked, step.count if self.step is step else before)
            if self._moment is not None:
                self._moment("after_step")

    def resume_point(self, gain: Callable[[float], float]) -> ResumePoint:
        """Return the resume point for a checkpoint saved now; a step counts as done if its update was applied.

        Args:
            gain: Returns the statistical progress of a step at a given scale (global / initial batch size).
        """
        step = self.outermost
        if step is None or self.state.progress.optimizers_stepped == 0:
            return self.state.progress.resume_point(step.samples_left if step is not None else self._samples_left)
        done = self.state.progress.after(step.ordinal, step.count, gain(step.scale))
        return done.resume_point(step.total - done.passes[-1].position)


class StepSums:
    """Contributions of this rank to accumulators in uncommitted steps, keyed by nesting depth."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[tuple[int, int], dict[str, float]]] = {}
        self._made: dict[int, int] = {}

    def new_key(self, scope: int) -> tuple[int, int]:
        """Return a key for an accumulator made between steps: its scope (epoch, or -1) and a number in this scope."""
        self._made[scope] = number = self._made.get(scope, -1) + 1
        return scope, number

    def expected(self, progress: RunProgress) -> bool:
        """True if any rank may have added to accumulators made in the current epoch or outside epochs."""
        return bool(progress.sums) or -1 in self._made or progress.epoch in self._made

    def add(self, depth: int, key: tuple[int, int], name: str, value: float) -> None:
        """Add ``value`` to the sum ``name`` of the accumulator ``key``, in the step at nesting depth ``depth``."""
        sums = self._pending.setdefault(depth, {}).setdefault(key, {})
        sums[name] = sums.get(name, 0.0) + value

    def of(self, depth: int) -> Mapping[tuple[int, int], Mapping[str, float]]:
        """Return the sums of the step at nesting depth ``depth``, keyed by accumulator and then by name."""
        return self._pending.get(depth, {})

    def wait(self, depth: int) -> bool:
        """True if the steps up to nesting depth ``depth`` have sums that have not been counted yet."""
        return any(self._pending.get(each) for each in range(1, depth + 1))

    def undo_beyond(self, depth: int) -> None:
        """Drop the contributions of steps nested deeper than ``depth``, which are lost or have been counted."""
        self._pending = {at: sums for at, sums in self._pending.items() if at <= depth}


class SampleTally:
    """Tally of the samples that a step has used, summed over the ranks with the step's control values.

    Each rank contributes the hashes of the samples that its loader has handed out for the step.

    Args:
        ledger: Holds the step in progress.
    """

    resting: None = None

    def __init__(self, ledger: StepLedger) -> None:
        self._ledger = ledger
        self._heard: int | None = None
        self.ended: LoaderStep | StepRound | None = None  # what the vote is about

    def start(self) -> None:
        """Reset the tally, because a new group has been entered."""
        self._heard = None

    def size(self, world_size: int) -> int:
        """Return the number of values that each rank adds to the vote, which does not depend on the group's size."""
        return _PARTS

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return the sum of this rank's sample hashes, split into parts that are exact as float32."""
        step = self._ledger.outermost or self.ended
        own = 0 if step is None or step.hashed is None else step.hashed()
        return [float(own & _MASK), float(own >> _WIDTH & _MASK), float(own >> 2 * _WIDTH)]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Store the sum of the hashes across all ranks, for :meth:`take`."""
        low, middle, high = sums
        self._heard = (round(low) + (round(middle) << _WIDTH) + (round(high) << 2 * _WIDTH)) & BITS

    def take(self, step: LoaderStep | StepRound) -> int | None:
        """Return the sum of all ranks' sample hashes in a step, modulo 2^32, and clear it; None if unknown."""
        heard, self._heard, self.ended = self._heard, None, None
        return heard if step.hashed is not None else None
