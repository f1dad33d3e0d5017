"""What a loader needs of the run that it feeds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic_ray.adaptation.policy import Policy
from elastic_ray.batch.halving import Halving
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.data.resumable import ResumedRun
from elastic_ray.state.progress import PassProgress, RunProgress
from elastic_ray.steps.step import LoaderStep


class PassesView(Protocol):
    """The passes of the run's loaders."""

    @property
    def step(self) -> LoaderStep | None:
        """The innermost step in progress."""

    @property
    def next_ordinal(self) -> int:
        """Ordinal that the next pass of this epoch would get."""

    def ended_early(self, loader_pass: PassProgress) -> bool:
        """Whether a pass was to end with a step, which is committed."""

    def stopped(self, loader_pass: PassProgress) -> bool:
        """Whether a policy has ended the training in this pass."""

    def fetched(self, fetch: Callable[[], Any]) -> Any:
        """The micro-batch that ``fetch`` gives."""

    def check_group(self, loader_pass: PassProgress) -> None:
        """Before a step is cut: if the group was called off meanwhile, go on with the next one, as it is."""

    def compare_plan(self, loader_pass: PassProgress, facts: Callable[[], Mapping[str, Any]]) -> bool:
        """Compare what decides a pass's data before its first step in a group; False if another group was entered."""

    def begin_step(self, step: LoaderStep) -> None:
        """The first micro-batch of a step is about to be handed out."""

    def end_micro_step(self, step: LoaderStep) -> None:
        """A micro-step that does not synchronise was done."""

    def edge(self, loader_pass: PassProgress, *, ends_pass: bool = False) -> bool:
        """The step's body has run; returns whether the step was committed, else it is drawn again."""

    def end_pass(self, loader_pass: PassProgress, total: int, *, put_off: bool = False) -> None:
        """The pass has run out."""

    def abandon(self, left: PassProgress) -> None:
        """User code left the pass in the middle of a step."""


class LoadersView(Protocol):
    """The run's loaders."""

    @property
    def is_left(self) -> bool:
        """True if the loader that led has been let go, or led an opening that failed."""

    @property
    def info(self) -> LoaderInfo | None:
        """What the one that leads tells the job."""

    def lead(self, loader: object, info: LoaderInfo) -> None:
        """This one leads."""

    def leads(self, loader: object) -> bool:
        """Whether it does."""

    def add(self, close: weakref.WeakMethod[Callable[[], None]]) -> None:
        """It belongs to the run, which closes it at its end."""

    def add_late(self, join: weakref.WeakMethod[Callable[[Any], None]]) -> None:
        """It was made after the run's first epoch."""


class RegistryView(Protocol):
    """What the train function has built."""

    @property
    def loaders(self) -> LoadersView:
        """Its loaders."""

    @property
    def least_share(self) -> int:
        """Fewest samples that its models can be trained with at once."""

    def halving(self, steps: int) -> Halving | None:
        """Return which steps a single rank takes in two halves from here on; None for none."""


class LoaderRun(ResumedRun, Protocol):
    """See the module's text."""

    @property
    def rank(self) -> int:
        """Rank of this worker."""

    @property
    def world_size(self) -> int:
        """Ranks of the present group."""

    @property
    def shape(self) -> BatchChoice | None:
        """Batch shape of the loader that leads, None where its own default holds."""

    @property
    def shape_changes(self) -> int:
        """How often the group, the batch shape or the ranks' shares have changed."""

    @property
    def share_weights(self) -> tuple[float, ...] | None:
        """Shares of the ranks in a step's samples; None where they are equal."""

    @property
    def elastic(self) -> bool:
        """Whether the group may change."""

    @property
    def in_epochs(self) -> bool:
        """Whether the loop uses ``remaining_epochs_until``."""

    @property
    def progress(self) -> RunProgress:
        """Where the run stands."""

    @property
    def registry(self) -> RegistryView:
        """What the train function has built."""

    @property
    def passes(self) -> PassesView:
        """The passes of its loaders."""

    def add_policies(self, policies: Sequence[Policy]) -> None:
        """Ask these policies between steps; raises RuntimeError once training has begun."""

    def enter_loop(self) -> PassProgress:
        """The next pass of this epoch, with the position that it has already reached."""
