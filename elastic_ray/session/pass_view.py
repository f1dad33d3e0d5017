"""What the passes of a run's loaders need of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.intents import Announced
from elastic_ray.membership.messages import Returned
from elastic_ray.state.layout import DataPlan
from elastic_ray.state.progress import PassProgress, RunProgress
from elastic_ray.steps.lost_step import LostStep
from elastic_ray.steps.step import LoaderStep


class PassChanges(Protocol):
    """Changes of group and batch."""

    @property
    def furthest_passes(self) -> int:
        """Loader passes that the present group's furthest rank had ended when it was formed."""

    def check_group(self) -> None:
        """Before a step is cut: if the group was called off meanwhile, go on with the next one."""

    def between_steps(self, can_switch: Callable[[int], bool]) -> None:
        """Carry out what the ranks have agreed on."""

    def regroup(self, cause: str) -> int:
        """Find a group to go on with; returns the loader passes that its furthest rank has ended."""


class PassState(Protocol):
    """The state that all ranks share."""

    @property
    def progress(self) -> RunProgress:
        """Where the run stands."""

    @property
    def joined(self) -> bool:
        """True if this rank came to the present group without a state, and received that of the others."""


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

    def undo(self, step: LoaderStep, *, gradients_wait: bool = False) -> LostStep:
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
        self,
        what: Announced,
        added: Mapping[tuple[int, int], Mapping[str, float]],
        *,
        some_are_idle: bool = False,
        join: Callable[[Announced], None] | None = None,
        plan: DataPlan | None = None,
    ) -> Iterable[tuple[tuple[int, int], str, float]]:
        """Agree, and add up what the ranks' accumulators were given; raises ``CommunicationFailedError``."""

    def agree_on(self, what: Announced, payload: Sequence[float] = (), plan: DataPlan | None = None) -> object:
        """Announce what comes next, and wait for the others; raises ``CommunicationFailedError``."""


class PassGroup(Protocol):
    """The present group."""

    @property
    def generation(self) -> int:
        """Its number."""

    @property
    def returned(self) -> Sequence[Returned]:
        """Workers that belong to the group no more, for their train functions have returned."""

    @property
    def world_size(self) -> int:
        """Its ranks."""

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

    @property
    def gradients_wait(self) -> bool:
        """Whether gradients of a model wait for an update."""

    def drift_layout(self, *, trained: bool) -> int:
        """What the ranks must have in common to average them after a step."""

    def after_step(self) -> None:
        """All ranks have committed a step that trained; raises CommunicationFailedError."""

    def join(self, what: Announced) -> None:
        """This rank has no sample: take part in what others do with a model; raises CommunicationFailedError."""

    def collapse(self, *, gather: bool = True) -> None:
        """Make models one that differ from rank to rank; raises CommunicationFailedError."""


class PassClock(Protocol):
    """Times of steps."""

    def edge(
        self,
        shape: BatchChoice | None,
        micro_steps: int,
        samples: int,
        strategy: str | None,
        *,
        uneven: bool = False,
    ) -> None:
        """A step was committed; ``shape`` None when it trained nothing, ``strategy`` while one is being chosen;
        ``uneven`` with unequal shares."""

    def micro(self) -> None:
        """A micro-step that does not synchronise was done."""


class PassMeter(Protocol):
    """Times of the step in progress, which all ranks hear of."""

    @property
    def on(self) -> bool:
        """Whether anybody asks for them."""

    def begin_step(self) -> None:
        """The loader is about to fetch the first micro-batch of a step of training."""

    def waited_for_data(self, seconds: float) -> None:
        """The loader has fetched a micro-batch of the step [s]."""

    def end_step(self) -> None:
        """The step was committed."""


class PassPolicies(Protocol):
    """Policies of the user's, asked between steps."""

    def before_step(self, step: LoaderStep) -> None:
        """A step has begun."""

    def after_step(self, step: LoaderStep) -> None:
        """A step that trained was committed."""

    def end_epoch(self) -> None:
        """The epoch in progress is about to end."""

    def ends(self, loader_pass: PassProgress) -> bool:
        """Whether they have ended the training in this pass."""


class PassTypes(Protocol):
    """Shares by type of GPU."""

    @property
    def mixed(self) -> bool:
        """Whether the present group is on several types."""

    def comparable(self, sizes: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Samples of each rank and micro-batch, as they would be if the ranks' types had equal shares."""

    def after_step(self, sizes: Sequence[Sequence[float]]) -> None:
        """A step of training was committed, with these samples in each rank's micro-batches."""


class PassStragglers(Protocol):
    """Which workers are slow."""

    @property
    def uneven(self) -> bool:
        """Whether ranks have unequal shares of a step."""

    def after_step(self, sizes: Sequence[Sequence[float]]) -> None:
        """A step of training with these samples of each rank's micro-batches was committed."""


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

    @property
    def meter(self) -> PassMeter:
        """What all ranks know of each other's."""

    @property
    def adaptation(self) -> PassPolicies:
        """Policies of the user's."""

    @property
    def gpu_types(self) -> PassTypes:
        """What share each rank takes because of its GPU's type."""

    @property
    def stragglers(self) -> PassStragglers:
        """Which workers are slow."""
