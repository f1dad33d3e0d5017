"""Registry of the objects that a train function has built: models, loaders, hooks, buffers (pure).

Hooks for one point are called in the order of registration; hooks that a hook adds are called in the same round. The
order of the following moments matters, and ``tests/run/test_registry.py`` fails if two of them are swapped:

* ``BEFORE_FIRST_EPOCH`` precedes the first group, because the job is then informed of the loader, which hooks may set.
  An earlier run's loader joins before models check its batch. A model that a hook wraps is checked like any other.
* In a new group, in this order: ranks exchange state, models enter, agreements are reset, buffers are averaged, and
  ``SHAPE_CHANGED`` is called. Each relies on the result of the previous one.
* Between steps, replicas are merged, then their buffers. Rank 0 gathers the state to save and ``BETWEEN_STEPS`` saves
  it. The group changes only then, because leavers may hold parts; they hand these over in ``before_change``.
* A worker that is preempted merges replicas before it leaves, and calls no hook.
* ``BEFORE_END`` precedes the end of policies and the report that the run has ended, because hooks may end a last epoch.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.batch.halving import LEAST_HALF, UNHALVED_STEPS, Halving
from elastic_ray.batch.reports import LoaderInfo, ModelInfo, NoiseSignal
from elastic_ray.batch.scaling_rules import step_gain
from elastic_ray.consensus.intents import Announced
from elastic_ray.consensus.saving import SaveAgreement
from elastic_ray.monitoring.monitoring import Monitoring
from elastic_ray.run.participant import Participant
from elastic_ray.state.layout import MergeLayout, digest
from placement.goodput.model import NoiseScale

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator
    from elastic_ray.parallel.buffers import BufferSync
    from elastic_ray.sync.averaging.drift import Drift
    from placement.cluster.jobs import FoundStrategy

Noise = Callable[[], "NoiseScale | None"]


class HookPoint(enum.Enum):
    """Moment in a run when registered hooks are called."""

    BEFORE_FIRST_EPOCH = enum.auto()
    BETWEEN_STEPS = enum.auto()
    UPDATE_LEFT_OUT = enum.auto()  # of whichever model
    SHAPE_CHANGED = enum.auto()  # of the batch, or of the group
    CHECKPOINT_ASKED = enum.auto()  # by a policy
    BACKWARD_LOST = enum.auto()  # for lack of memory
    BEFORE_END = enum.auto()  # of the train function
    REPLACED = enum.auto()  # by another run of this process


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about one wrapped model; each is a function that returns the fact's current value."""

    noise: Noise  # its noise scale, equal on all ranks; None before an estimate
    learning_rates: Callable[[], tuple[float, ...]] = tuple  # as set by user code and schedulers
    rate_factor: Callable[[], float] = float  # on its learning rates in the latest step
    signal: Callable[[], NoiseSignal | None] = lambda: None  # rank 0's estimate of its gradient signal


class ModelRegistry:
    """Registry of wrapped models, in order of wrapping; the first model determines the job's efficiency.

    Attributes:
        infos: Descriptions of the models, as sent to the controller.
        first: Facts about the first model; None before it is wrapped.
    """

    def __init__(self) -> None:
        self.infos: tuple[ModelInfo, ...] = ()
        self.first: ModelFacts | None = None

    def __len__(self) -> int:
        return len(self.infos)

    def add(self, info: ModelInfo, facts: ModelFacts) -> int:
        """Add a newly wrapped model and return its number; ``info`` describes it to the controller."""
        self.infos = (*self.infos, info)
        self.first = self.first or facts
        return len(self.infos) - 1

    def noise(self) -> NoiseScale | None:
        """Return the first model's gradient noise scale; None before it is estimated."""
        return self.first.noise() if self.first is not None else None

    def gain(self, scale: float) -> float:
        """Return the progress of one step at ``scale`` x the initial batch size, in steps at the initial size."""
        return 1.0 if scale == 1.0 else step_gain(scale, self.noise())


class LoaderRegistry:
    """Registry of loaders; the leading loader sets the job's limits and uses the batch that the job chooses.

    Args:
        fixed_batch: True if the batch size stays constant even if the loader allows it to adapt.
    """

    def __init__(self, *, fixed_batch: bool = False) -> None:
        self._fixed_batch = fixed_batch
        self.info: LoaderInfo | None = None  # what it tells the job, None before there is one
        self.in_processes = False  # samples of the leading loader are loaded by worker processes
        self.leading: weakref.ref[Any] | None = None  # its worker processes must go when the user lets it go
        self._late: list[weakref.WeakMethod[Any]] = []
        self.failed = False  # opening the run failed, so that the next loader to be made leads
        self._made: list[weakref.WeakMethod[Any]] = []

    def lead(self, loader: object, info: LoaderInfo, *, in_processes: bool = False) -> None:
        """Make this loader set the job's limits; with ``in_processes``, worker processes load samples."""
        if self._fixed_batch:
            if info.limits.per_worker:
                raise ValueError(
                    "scale_with_workers=True and ElasticConfig(fixed_batch=True) contradict each other: leave one out"
                )
            info = dataclasses.replace(info, limits=dataclasses.replace(info.limits, max_batch_size=None))
        self.leading, self.info, self.failed = weakref.ref(loader), info, False
        self.in_processes = in_processes

    @property
    def is_left(self) -> bool:
        """True if the leading loader (which sets the job's limits) was garbage-collected, or its run failed to open."""
        return self.failed or (self.leading is not None and self.leading() is None)

    def leads(self, loader: object) -> bool:
        """True if `loader` is the leading loader."""
        return self.leading is not None and self.leading() is loader

    def add_late(self, join: weakref.WeakMethod[Any]) -> None:
        """Add a loader made after this run's first epoch; ``join`` moves it to another run."""
        self._late = [known for known in self._late if known() is not None]
        self._late.append(join)

    def add(self, close: weakref.WeakMethod[Any]) -> None:
        """Add a loader to this run; ``close`` ends its worker processes."""
        self._made = [*(known for known in self._made if known() is not None), close]

    def close(self) -> None:
        """Close the run's loaders: end their worker processes, even if the loaders are still referenced."""
        for reference in self._made:
            if (close := reference()) is not None:
                close()

    def late(self) -> Iterator[Callable[[Any], None]]:
        """For each remaining loader from :meth:`add_late`, yield the function that moves it to another run."""
        for reference in self._late:
            if (join := reference()) is not None:
                yield join


class Registry:
    """Registry of one run: its models, loaders, hooks and buffers."""

    def __init__(self, monitoring: Monitoring | None = None, *, fixed_batch: bool = False) -> None:
        self.monitoring = monitoring or Monitoring()
        self.models = ModelRegistry()
        self.loaders = LoaderRegistry(fixed_batch=fixed_batch)
        self.hooks: dict[HookPoint, list[Callable[[], None]]] = {point: [] for point in HookPoint}
        self.buffers: list[BufferSync] = []  # of each model, made alike in every new group and at the end of a pass
        self.gradients: list[Participant] = []
        self.drifting: set[int] = set()  # models that are averaged, by their numbers
        # each returns the time per sample of a model's latest passes at its GPU's peak [s], or None if that is unknown
        self.efforts: list[Callable[[], float | None]] = []
        self.saving = SaveAgreement()  # what the ranks agree on of checkpoints that all of them write
        self.least_share = 1
        self.halving_changes = 0  # how often it has changed which steps are halved, but for changes of group and batch
        self._adds_up = False  # gradients over several steps
        self._needs_halves = False  # layers do not show the noise
        self.saves: Callable[[], bool] = lambda: False  # whether this worker has something to save
        self.folds_random = True  # torch's generators become each rank's own with the first epoch

    def add_hook(self, point: HookPoint, hook: Callable[[], None]) -> None:
        """Register ``hook`` to be called whenever the run reaches the given point."""
        self.hooks[point].append(hook)

    def call(self, point: HookPoint) -> None:
        """Call the hooks registered for this point, because the run has reached it."""
        for hook in self.hooks[point]:
            hook()

    @property
    def buffer_layout(self) -> int:
        """Digest of the buffers' layout; buffers can only be synchronised if it is the same on all ranks."""
        return digest([buffers.layout for buffers in self.buffers])

    def sync_buffers(self, communicator: Communicator) -> None:
        """Make all buffers equal on all ranks."""
        for buffers in self.buffers:
            buffers(communicator)

    def take_peak_s(self) -> float | None:
        """Return the models' latest time per sample at their GPU's peak [s], summed; None if unknown."""
        found = [effort() for effort in self.efforts]
        return sum(each for each in found if each) if found and None not in found else None

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the models' strategies."""
        return tuple(each.strategy_name for each in self.gradients)

    def gradients_of(self, model: int) -> Participant:
        """Return what keeps a model's gradients identical on all ranks. Raises ValueError if there is no such model."""
        if model >= len(self.gradients):
            raise ValueError(f"there is no model {model}: the loop has wrapped {len(self.gradients)}")
        return self.gradients[model]

    @property
    def found_strategies(self) -> dict[str, FoundStrategy]:
        """Strategies that have won races, keyed by model number, backend, and distribution of ranks over nodes."""
        return {form: found for each in self.gradients for form, found in each.found_strategies.items()}

    @property
    def strategy_key(self) -> str | None:
        """Joined keys of the models' strategies, used to record step times; None during a race."""
        if len(self.gradients) == 1:
            return self.gradients[0].strategy_key
        keys = [each.strategy_key for each in self.gradients]
        return None if None in keys else "+".join(key for key in keys if key)

    @property
    def samples(self) -> int | None:
        """Leading loader's number of samples per epoch, as determined at its construction; None if unknown."""
        return self.loaders.info.dataset_size if self.loaders.info is not None else None

    def halving(self, steps: int) -> Halving | None:
        """Return the rule for splitting a single rank's steps into two halves, after ``steps`` committed steps.

        The halves' gradients reveal the gradient noise. Returns None if no steps are split, for example because the
        noise can be measured in the models' layers.
        """
        wanted = self._wanted_halving(steps)
        by_layers = wanted is not None and not self._needs_halves and self.monitoring.request.variance_every is None
        every = self.monitoring.request.noise_every
        if by_layers and all(each.measure_examples(every, wanted=True) for each in self.gradients):
            return None
        for each in self.gradients:
            each.measure_examples(None, wanted=False)
        return wanted

    def need_halves(self) -> None:
        """Request that steps be halved from now on, because a model's layers could not measure its noise."""
        if not self._needs_halves:
            self._needs_halves = True
            self.halving_changes += 1

    def _wanted_halving(self, steps: int) -> Halving | None:
        """Return the steps where an adaptive batch or a monitor needs the noise; None for no steps."""
        if self._adds_up or not any(each.gives_statistics for each in self.gradients):
            return None
        limits = self.loaders.info.limits if self.loaders.info is not None else None
        asked = self.monitoring.request
        every = min((n for n in (asked.noise_every, asked.variance_every) if n is not None), default=None)
        adapts = limits is not None and not limits.one_size
        if not adapts and every is None:
            return None
        least = max(LEAST_HALF, limits.lower if limits is not None and adapts else 1)
        return Halving(since=steps + UNHALVED_STEPS, adapts=adapts, every=every, least=least)

    def adds_up_gradients(self) -> None:
        """Record that the loop accumulates gradients over steps, so that no more steps are halved."""
        if not self._adds_up:
            self._adds_up = True
            self.halving_changes += 1

    def have_chosen(self, number: int) -> bool:
        """True if each of the first `number` models has a chosen strategy, with no search in progress."""
        return all(each.strategy_key is not None for each in self.gradients[:number])

    @property
    def meets_in_passes(self) -> bool:
        """True if a model's passes wait for other ranks in collectives other than gradient reductions."""
        return any(each.meets_in_passes for each in self.gradients)

    @property
    def sends_in_pairs(self) -> bool:
        """True if ranks exchange parts of a model's tensors in pairs."""
        return any(each.sends_in_pairs for each in self.gradients)

    @property
    def gradients_are_local(self) -> bool:
        """True if the accumulated gradients of any model differ between ranks."""
        return any(each.local for each in self.gradients)

    @property
    def gradients_wait(self) -> bool:
        """True if any model has accumulated gradients that no optimizer step has applied yet."""
        return any(each.is_open for each in self.gradients)

    @property
    def _drifts(self) -> list[Drift]:
        """Averaging schedule of each model whose replicas may diverge."""
        return [each.drift for each in self.gradients if each.drift is not None]

    @property
    def drifts(self) -> bool:
        """True if the replicas of any model intentionally diverge."""
        return any(each.drifts for each in self.gradients)

    @property
    def round_period(self) -> int:
        """Largest number of steps in a round of rank-local steps; 1 if any model reduces gradients in every step."""
        if len(self.drifting) < len(self.gradients):
            return 1
        averages = [each.average if each.on else None for each in self._drifts]
        return min((each.period if each is not None else 1 for each in averages), default=1)

    @property
    def gives_back(self) -> bool:
        """True if slow ranks give away steps to other ranks within a round."""
        if self.loaders.in_processes:  # they load this rank's own samples only
            return False
        averages = (each.average for each in self._drifts)
        return self.round_period > 1 and all(each is not None and each.give_back for each in averages)

    @property
    def pulling(self) -> int:
        """Digest of the models that ranks pull from each other; 0 for none."""
        found = [number for number, each in enumerate(self.gradients) if each.drift is not None and each.drift.pulls]
        return digest(found) if found else 0

    def enter_exchanges(self, communicator: Communicator) -> None:
        """Start exchanging models with the ranks in a group; raises CommunicationFailedError if the group breaks."""
        for each in self._drifts:
            if each.pulls:
                each.enter_exchange(communicator)

    @property
    def may_train(self) -> bool:
        """True if a step that starts now may train a model."""
        return any(each.may_train for each in self.gradients)

    @property
    def round_steps(self) -> int:
        """Number of steps in the round that is starting now, up to the next average."""
        if self.round_period == 1:
            return 1
        return min(each.steps_to_average for each in self._drifts)

    @property
    def in_parts(self) -> bool:
        """True if state is divided between ranks and each rank can write its own part; the same on all ranks."""
        gradients = self.gradients
        return any(each.divided for each in gradients) and not any(each.tabled for each in gradients)

    @property
    def saves_together(self) -> bool:
        """True if no rank alone can save the final state, because state is divided or replicas differ."""
        return any(each.divided or each.tabled or each.drifts for each in self.gradients)

    @property
    def settled(self) -> bool:
        """True if all replicas are identical and this rank alone should write the checkpoint."""
        if self.in_parts and self.saving.together:
            return False
        return all(each.settled for each in self.gradients)

    @property
    def marker(self) -> int:
        """Number of the last average of models completed on this rank; higher for later ones, 0 before the first."""
        return max((each.marker for each in self._drifts), default=0)

    def drift_layout(self, *, trained: int) -> int:
        """Return a digest, to be compared across ranks, of the models that are averaged after a step; 0 for none.

        Args:
            trained: Number of steps that have trained, or 1 if the current step has, otherwise 0.
        """
        layouts = [(number, each.fix_drift()) for number, each in enumerate(self.gradients) if each.drifts]
        return digest((layouts, trained)) if layouts else 0

    def prepare_averages(self, *, ends_pass: bool) -> None:
        """Start the averages of a round that has ended; raises CommunicationFailedError if the group breaks."""
        for each in self.gradients:
            each.prepare_average(ends_pass=ends_pass)

    def after_step(self) -> None:
        """Average models if due, after a training step that all ranks have committed."""
        if len(self.gradients) == 1:
            self.gradients[0].after_step(agree_on_scale=False)
            return
        drifting = [each.scaler for each in self._drifts if each.on and each.scaler is not None]
        for each in self.gradients:
            shared = each.drift is not None and not each.drift.on and any(each.drift.scaler is one for one in drifting)
            each.after_step(agree_on_scale=shared)

    def join(self, what: Announced) -> None:
        """Join the action ``what`` that other ranks have announced, because this rank has no samples in the step."""
        self.gradients[what.index].join(what)

    @property
    def merge_layout(self) -> MergeLayout | None:
        """Layout of what :meth:`collapse` merges now; None if no replicas diverge."""
        layouts = [(number, each.merge_layout) for number, each in enumerate(self.gradients) if each.drifts]
        return MergeLayout(digest(layouts)) if layouts else None

    def collapse(self, *, gather: bool = True, alike: bool = False) -> None:
        """Merge diverged replicas into one model; `alike` means that ranks have compared their `merge_layout`."""
        for each in self.gradients:
            each.collapse(gather=gather, alike=alike)

    def reconcile(self, communicator: Communicator, marker: int, *, holds: bool) -> None:
        """Make diverged replicas identical in a new group, before its ranks exchange state; see ``Drift.reconcile``."""
        counts = holds and self.marker == marker
        for each in self._drifts:
            each.reconcile(communicator, marker, holds=holds, counts=counts)

    def prepare_to_save(self) -> None:
        """Collect on rank 0, before it saves, the state that only other ranks hold."""
        for each in self.gradients:
            each.prepare_to_save()

    def before_change(self, stays: Sequence[bool]) -> None:
        """Prepare all models for a group change that the ranks have agreed on.

        Raises CommunicationFailedError if the current group breaks during the call.
        """
        for each in self.gradients:
            each.before_change(stays)

    def enter_group(self) -> None:
        """Enter the current group with all of the run's models; called on every rank."""
        for each in self.gradients:
            each.enter_group()
