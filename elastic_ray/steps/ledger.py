"""Ledger of one rank's steps: the one in progress, what is committed, and what to undo if it is lost (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elastic_ray.state.progress import BITS, PassProgress, RunProgress
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.steps.round import StepRound
from elastic_ray.steps.step import LoaderStep

if TYPE_CHECKING:
    from elastic_ray.state.shared_state import SharedState

# Sums of hashes travel in three parts of 11 bits: over 8192 ranks these are exact in float32.
_PARTS, _WIDTH = 3, 11
_MASK = (1 << _WIDTH) - 1


class Replay:
    """Replay of user code up to where the others are; its effects on the received state are undone.

    Args:
        between_epochs: the code comes by passes of earlier epochs first.
    """

    def __init__(self, state: SharedState, *, between_epochs: bool = False) -> None:
        progress = state.progress
        state.snapshot()
        self._state = state
        self._ordinal = len(progress.passes) - 1
        self._collective = progress.joined_at
        self._effects = progress.effects()
        self._before_pass = between_epochs or bool(progress.passes)

    @staticmethod
    def needed(progress: RunProgress) -> bool:
        """True if the others are within an epoch's code."""
        return bool(progress.passes) or progress.joined_at is not None

    @property
    def before_pass(self) -> bool:
        """True if the others' latest pass is still to come; else the code runs up to the collective they are in."""
        return self._before_pass

    def reach_pass(self, ordinal: int) -> bool:
        """Record that the code comes to the epoch's pass of this number; True if it has caught up."""
        if ordinal < self._ordinal:
            return False
        self._before_pass = False
        self._take_back()
        return self._collective is None

    def reach_collective(self, number: int) -> bool:
        """Record that the code comes to its collective of this number; True if it has caught up."""
        if self._before_pass or self._collective is None or number < self._collective:
            return False
        self._take_back()
        return True

    def _take_back(self) -> None:
        self._state.roll_back()
        self._state.progress.restore_effects(self._effects)


@dataclasses.dataclass(frozen=True, slots=True)
class LostStep:
    """Facts of a lost step that matter once a new group has been found."""

    nested: bool  # whether it lies within a step of another pass
    outer_lost: bool  # whether that one has failed as well, or its gradients wait for an update: they may be gone
    # where the outermost pass is, and optimizers stepped in its step; a pass within it may be a step behind
    before: tuple[int, int]


class StepLedger:
    """Tracks the current step: what is committed and what to undo if the step is lost.

    Args:
        moment: a named moment of the run, for scripted faults; None without any.
    """

    def __init__(self, state: SharedState, *, moment: Callable[[str], None] | None = None) -> None:
        self.state, self._moment = state, moment
        self.step: LoaderStep | None = None  # the innermost step in progress, None between steps
        self.round: StepRound | None = None  # that the outermost step is in; None where each step is voted on
        # the training step in progress, also while an evaluation pass runs inside it
        self.outermost: LoaderStep | None = None
        self.depth = 0  # loader passes that are in the middle of a step (a nested evaluation makes it 2)
        self.failure: str | None = None  # why the step in progress is lost; None where it is not
        self.failed = False  # whether the step in progress is lost and will be drawn again
        self.trains_in_rounds = False  # the last round in this group has trained
        # called for each own step of a round that another rank makes: what the loop's code would have moved on
        self.on_given: list[Callable[[], None]] = []
        self._outer: list[LoaderStep] = []
        self.next_ordinal = 0  # ordinal that the next loader pass of this epoch would get
        self._in_epoch = False
        self.abandoned = 0  # steps that user code has left, and that are to be committed
        self._samples_left = 0
        self._failure: str | None = None
        # Why outer steps are lost while a pass within them continues, and how many are.
        self._around: tuple[str | None, int] = (None, 0)
        self._reduced = False
        self._trains = False
        self._updates_asked = 0
        self._updating = False
        self._counts_one = False
        self._replay: Replay | None = None

    @property
    def accumulating(self) -> bool:
        """True if the micro-step in progress leaves its gradients to a later one of its step."""
        step = self.outermost
        return step is not None and not step.is_last_micro and self.abandoned < self.depth

    @property
    def epochs_done(self) -> float:
        """Epochs of data trained on so far, fractions included."""
        step = self.outermost
        fraction = step.loader_pass.position / step.total if step is not None and step.total else 0.0
        return self.state.progress.epoch + fraction

    @property
    def initial_steps(self) -> int:
        """Number of initial-batch steps that the step in progress counts as, by its samples; 1 outside of steps.

        Over a pass they add up to as many as it would have at the initial batch, however the batch changes within.
        """
        step = self.outermost
        if step is None or self._counts_one or self.abandoned >= self.depth:
            return 1
        begin, first = step.loader_pass.position, step.init_batch_size
        return -(-(begin + step.count) // first) - -(-begin // first)

    @contextmanager
    def counting_one(self) -> Iterator[None]:
        """Have ``initial_steps`` be 1 within the block: what counts epochs moves in an epoch's last step."""
        self._counts_one = True
        try:
            yield
        finally:
            self._counts_one = False

    @property
    def accumulator_scope(self) -> int:
        """Epoch of an accumulator that is made now; -1 before the first."""
        return self.state.progress.epoch if self._in_epoch else -1

    def begin_epoch(self) -> None:
        """Count loader passes from the first again."""
        self._in_epoch = True
        self.next_ordinal = 0

    def begin_replay(self, *, between_epochs: bool = False) -> None:
        """Start to replay user code up to where the others are; the received state has its effects already.

        Args:
            between_epochs: up to the next pass that begins here; else up to their place within the epoch.
        """
        if between_epochs and self.replays_passes:
            return
        needed = between_epochs or Replay.needed(self.state.progress)
        self._replay = Replay(self.state, between_epochs=between_epochs) if needed else None

    @property
    def replaying(self) -> bool:
        """True while the loop's code runs only to catch up with the others."""
        return self._replay is not None

    @property
    def replays_passes(self) -> bool:
        """True if the others' latest pass is still to come."""
        return self._replay is not None and self._replay.before_pass

    def reach_collective(self, number: int) -> None:
        """End the replay if user code has come to the collective `number` that the others are in."""
        if self._replay is not None and self._replay.reach_collective(number):
            self._replay = None

    def begin_pass(self) -> int:
        """Start the epoch's next loader pass; return its number in the epoch.

        Raises RuntimeError: a pass over whole batches is in progress.
        """
        if self.step is not None and self.step.whole:
            raise RuntimeError(
                "no loader may be iterated within a pass over whole_batches=True: towards its end some ranks have no "
                "batch there, and would miss that loop; iterate one after the other"
            )
        ordinal, self.next_ordinal = self.next_ordinal, self.next_ordinal + 1
        if self._replay is not None and self._replay.reach_pass(ordinal):
            self._replay = None
        self.state.progress.begin_pass(ordinal)
        return ordinal

    def end_pass(self, ended: PassProgress) -> None:
        """End a pass that all ranks have left."""
        ended.end()
        if self.depth == 0:
            self._samples_left = 0

    def abandon(self, left: PassProgress) -> None:
        """Abandon a pass that user code left in the middle of a step, by ``break`` or by an exception."""
        if any(step.loader_pass is left for step in (*self._outer, self.step) if step is not None):
            self.abandoned += 1

    def abandon_all(self) -> None:
        """Abandon all passes whose iterators still wait for their ``next`` at the end of the epoch."""
        self.abandoned = self.depth

    def take_abandoned(self) -> LoaderStep | None:
        """Return the innermost of the steps that were left, to be committed now; None when there is no more."""
        if not self.abandoned or self.step is None:
            return None
        self.abandoned -= 1
        return self.step

    def begin_round(self, loader_pass: PassProgress, counts: Sequence[int], steps: int, *, copies: bool) -> None:
        """Start a round of so many steps, before the first of them.

        Args:
            counts: samples of each; none where they are not known.
            copies: what it takes to undo it is kept; a group that cannot change needs none.
        """
        if copies:
            self.state.begin_round()
        self.round = StepRound(loader_pass, loader_pass.position, self.state.progress.loader_steps, counts, steps)

    def leave_rest(self, step: LoaderStep, generation: int, gain: Callable[[float], float]) -> None:
        """Count the steps of the round that are still to come after the loop was left: others may make them, or none.

        So all ranks leave the round at one place. Which samples were used is not known.
        """
        if self.round is not None:
            for count in self.round.counts[self.round.steps :]:
                self.round.loader_pass.advance(count, None)
                self.state.progress.commit(generation)
                if self.round.trained:
                    self.state.progress.commit_training(gain(step.scale))
            self.round.leave()

    def end_round(self, hashes: int | None) -> None:
        """Count the round that all ranks have voted for; ``hashes`` of the samples that they have used in it."""
        if self.round is not None:
            self.round.loader_pass.advance(0, hashes)
            self.trains_in_rounds = self.round.trained
            self.round = None
            self.state.end_round()

    def lose_round(self) -> None:
        """Return to where the round began; the model follows when a new group knows that no rank has committed it."""
        self.round = None
        self.state.lose_round()

    def begin(self, step: LoaderStep) -> None:
        """Start a step, before its first micro-batch is handed out."""
        if self.step is not None:
            self._around = (self._failure, self.depth) if self._failure is not None else self._around
            self._outer.append(self.step)
        else:
            self._updates_asked = 0
            self._failure, self._around = None, (None, 0)
            self._reduced = self._trains = False
            self.state.snapshot()
        self.step = step
        self._follow()

    def _follow(self) -> None:
        """Update what is read many times in a step, after steps have begun or ended or a failure has changed."""
        outer, step = self._outer, self.step
        self.outermost = outer[0] if outer else step
        self.depth = len(outer) + (step is not None)
        cause, steps = self._around
        self.failure = self._failure if self._failure is not None or self.depth > steps else cause
        self.failed = self.failure is not None

    def end(self, expected: PassProgress | None = None) -> LoaderStep:
        """End the innermost step, whose body has run; return it, to be committed or undone.

        Args:
            expected: the pass whose step it is; None for the innermost one's.

        Raises RuntimeError: another pass was begun within the step and has not ended; or an optimizer step was not
        completed.
        """
        if self._updating:
            self._check_updated()
        if expected is not None and self.step is None:
            raise RuntimeError(
                "an iterator over an AdaptiveDataLoader belongs to the epoch in which it was made, and that is over: "
                "call iter(loader) again in each epoch"
            )
        if expected is not None and self.step is not None and self.step.loader_pass is not expected:
            raise RuntimeError(
                "loops over AdaptiveDataLoaders may be nested but not interleaved, as zip(loader_a, loader_b) does: "
                "use one loader over a dataset that gives both items"
            )
        if self.step is None:
            raise AssertionError("an edge without a step")
        step, self.step = self.step, self._outer.pop() if self._outer else None
        self._follow()
        return step

    @property
    def needs_vote(self) -> bool:
        """True if the step that has just ended has made no collective that could carry the ranks' vote."""
        return self.step is not None or not self._reduced

    @property
    def trains(self) -> bool:
        """True if the outermost step, in progress or just ended, has trained."""
        return self._updates_asked > 0 or self._trains

    def commit(
        self, step: LoaderStep, generation: int, gain: Callable[[float], float], hashes: int | None = None
    ) -> bool:
        """Count a step that has ended.

        Args:
            gain: statistical progress of a step at a scale.
            hashes: sum of the hashes of its samples' indices, in a round of this rank's; None where that is not known.

        Returns whether it trained; never, if it was nested in another.
        """
        within = self.round if self.step is None else None
        if not step.taken:
            step.loader_pass.advance(step.count, hashes if within is None or hashes is None else 0)
            self.state.progress.commit(generation)
        if self.step is not None:
            return False
        # Passes nested in the step are over with it: every step counts them from the same number again.
        self._forget_nested(step)
        trained = self._updates_asked > 0 or self._trains or (step.given and self.trains_in_rounds)
        self.state.forget_snapshot()
        if within is not None:
            within.add(step, hashes, trained=trained)
        if trained and not step.taken:
            self.state.progress.commit_training(gain(step.scale))
            if step.weighed and (weight := step.counted) is not None:
                self.state.progress.count_weights(weight, step.count)
        self.state.progress.count_optimizers(0)
        self._samples_left = step.samples_left
        return trained

    def undo(self, step: LoaderStep, *, gradients_wait: bool = False) -> LostStep:
        """Undo a step that was lost: take back what user code moved on in it. :meth:`resume` follows.

        Args:
            gradients_wait: gradients of the step around it wait for an update.
        """
        nested, outer_lost = self.step is not None, gradients_wait or self._around[1] > 0
        if not nested:
            self.state.roll_back()
            self._forget_nested(step)
        return LostStep(nested, outer_lost, self._place)

    def resume(self, lost: LostStep, cause: str) -> None:
        """Resume in the group found after :meth:`undo`; a surrounding step that no rank finished is drawn again too.

        The pass within it continues first, so that user code has its result: only then is the failure in force.
        """
        outer_lost = lost.outer_lost or not self._reduced  # its shares were cut for a group that is gone
        if lost.nested and outer_lost and lost.before == self._place:
            self._around = cause, self.depth
            self._follow()

    @property
    def _place(self) -> tuple[int, int]:
        step = self.outermost
        return step.loader_pass.position if step is not None else 0, self.state.progress.optimizers_stepped

    def _forget_nested(self, step: LoaderStep) -> None:
        self.state.progress.forget_passes(step.ordinal)
        self.next_ordinal = step.ordinal

    def mark_training(self) -> None:
        """Mark the step as training, once backward begins, even if AMP leaves its update out.

        Raises RuntimeError: in a pass that only evaluates.
        """
        if self.step is not None and self.step.whole:
            raise RuntimeError(
                "backward() within a pass over whole_batches=True, which is for evaluation: towards its end some ranks "
                "have no batch. To train, leave whole_batches out; where a loss needs several samples together, make "
                "them one item of the dataset"
            )
        self._trains = True

    @property
    def reduced(self) -> bool:
        """True if a gradient reduction of the step in progress was completed."""
        return self._reduced

    def mark_reduced(self) -> None:
        """Mark that a gradient reduction of this step was completed."""
        self._reduced = True

    def fail(self, cause: str) -> None:
        """Fail the step in progress after a collective failed: nothing of it will be applied here."""
        if self._failure is None:
            self._failure = cause
            self._follow()

    def clear_failure(self) -> None:
        """Clear the failure of another group in a new one, whose ranks share steps once all have trained in it."""
        self.trains_in_rounds = False
        self._failure, self._around = None, (None, 0)
        self._follow()

    def may_apply(self) -> bool:
        """True if the optimizer step that user code asks for counts now.

        Not within an accumulation, not after a failure, and not again when a survivor already applied it before
        this (re-drawn) step: a GAN's first optimizer may have stepped when the second's gradients were lost.
        """
        if self._updating:
            self._check_updated()
        step = self.outermost
        if step is None:
            return not self.replaying  # else the state that the others hold would be stepped once more
        if self.failed or not step.is_last_micro:
            return False
        self._updates_asked += 1
        if self._updates_asked <= self.state.progress.optimizers_stepped:
            return False
        if self._moment is not None:
            self._moment("optimizer_step")
        return True

    def begin_update(self) -> None:
        """Start an update, which :meth:`applied` ends; if it fails half-way, this rank's state is of no step."""
        self._updating = True

    @property
    def half_updated(self) -> bool:
        """True if an optimizer step has started and has not been completed."""
        return self._updating

    def _check_updated(self) -> None:
        if self._updating:
            raise RuntimeError(
                "optimizer.step() failed half-way, and the error was caught: parameters and optimizer state of this "
                "worker are of no step. Let errors inside optimizer.step() leave the train function"
            )

    def cancel_update(self) -> None:
        """Cancel the update of a lost step, in which the optimizer has changed nothing."""
        self._updating = False

    def applied(self) -> None:
        """Record that the optimizer step was applied, or left out for good."""
        self._updating = False
        if (step := self.outermost) is not None:
            self.state.progress.count_optimizers(self._updates_asked, step.count)
            if self._moment is not None:
                self._moment("after_step")

    def resume_point(self, gain: Callable[[float], float]) -> ResumePoint:
        """Return the resume point of a checkpoint taken now; a step whose update is in the model counts as done.

        Args:
            gain: statistical progress of a step at a scale.
        """
        step = self.outermost
        if step is None or self.state.progress.optimizers_stepped == 0:
            return self.state.progress.resume_point(step.samples_left if step is not None else self._samples_left)
        done = self.state.progress.after(step.ordinal, step.count, gain(step.scale))
        return done.resume_point(step.total - done.passes[-1].position)


class StepSums:
    """Contributions of this rank to accumulators in uncommitted steps, by depth (a nested pass has its own)."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[tuple[int, int], dict[str, float]]] = {}
        self._made: dict[int, int] = {}

    def new_key(self, scope: int) -> tuple[int, int]:
        """Return the key of a newly made accumulator: its scope (an epoch, -1 outside epochs) and its number there."""
        self._made[scope] = number = self._made.get(scope, -1) + 1
        return scope, number

    def expected(self, epoch: int) -> bool:
        """True if any rank may have added to an accumulator: all ranks make the same ones at the same places."""
        return -1 in self._made or epoch in self._made

    def add(self, depth: int, key: tuple[int, int], name: str, value: float) -> None:
        """Add to a sum in the innermost step in progress."""
        sums = self._pending.setdefault(depth, {}).setdefault(key, {})
        sums[name] = sums.get(name, 0.0) + value

    def take(self, depth: int) -> Mapping[tuple[int, int], Mapping[str, float]]:
        """Return and forget the contributions of the step at ``depth``."""
        return self._pending.pop(depth, {})

    def undo_beyond(self, depth: int) -> None:
        """Undo the contributions of lost steps deeper than ``depth``."""
        self._pending = {at: sums for at, sums in self._pending.items() if at <= depth}


class SampleTally:
    """Tally of the samples that a step has used, added up over the ranks with its sums: a ``ControlPart``.

    Each rank tells the hashes of the samples that its loader has handed out for the step.

    Args:
        ledger: knows the step in progress.
    """

    def __init__(self, ledger: StepLedger) -> None:
        self._ledger = ledger
        self._heard: int | None = None
        self._ended: LoaderStep | StepRound | None = None

    def begin(self) -> None:
        """A group was entered."""
        self._heard = None

    def size(self, world_size: int) -> int:
        """Number of values; the same for a rank alone, whose buckets stay as they are when others come."""
        return _PARTS

    def end(self, step: LoaderStep | StepRound) -> None:
        """The step or round has ended, and its vote follows."""
        self._ended = step

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return this rank's sum, in parts."""
        step = self._ledger.outermost or self._ended
        own = 0 if step is None or step.hashed is None else step.hashed()
        return [float(own & _MASK), float(own >> _WIDTH & _MASK), float(own >> 2 * _WIDTH)]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """The sums over all ranks."""
        low, middle, high = sums
        self._heard = (round(low) + (round(middle) << _WIDTH) + (round(high) << 2 * _WIDTH)) & BITS

    def take(self, step: LoaderStep | StepRound) -> int | None:
        """Return the sum of the hashes of the samples of what was committed, modulo 2^32; None if unknown."""
        heard, self._heard, self._ended = self._heard, None, None
        return heard if step.hashed is not None else None
