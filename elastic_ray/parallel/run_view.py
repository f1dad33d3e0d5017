"""What a wrapped model needs of the run that it is trained in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from elastic_ray.batch.noise_scale import NoiseSignal
from elastic_ray.batch.reports import LoaderInfo, ModelInfo
from elastic_ray.communication.communicator import Communicator
from elastic_ray.monitoring.monitoring import Monitoring
from elastic_ray.session.registry import HookPoint
from elastic_ray.state.group_dependent import GroupDependent
from elastic_ray.state.tree import Stateful
from elastic_ray.sync.engine.context import SyncConsensus, SyncContext, SyncGroup, SyncLedger
from elastic_ray.sync.optimizer_tiles.run_view import TileConsensus, TileGroup, TileLedger
from elastic_ray.sync.sharded.run_view import TableConsensus, TableGroup, TableLedger, TableStep
from placement.goodput.model import NoiseScale


class UpdateLedger(SyncLedger, TableLedger, TileLedger, Protocol):
    """Which step this rank is in, and whether its optimizers may step."""

    @property
    def step(self) -> TableStep | None:
        """The innermost step in progress."""

    @property
    def accumulating(self) -> bool:
        """Whether the micro-step in progress leaves its gradients to a later one."""

    @property
    def epochs_done(self) -> float:
        """Epochs of data trained on so far."""

    @property
    def initial_steps(self) -> int:
        """As how many steps of the initial batch the step in progress counts."""

    def may_apply(self) -> bool:
        """Whether the optimizer step that user code asks for is to be applied now."""

    def updating(self) -> AbstractContextManager[None]:
        """The optimizer steps within."""

    def applied(self) -> None:
        """It has stepped, or its update was left out."""


class UpdateGroup(SyncGroup, TableGroup, TileGroup, Protocol):
    """The present group, and what may become of it."""

    @property
    def most_workers(self) -> int:
        """Number of ranks that it may ever have, as far as that is known."""


class UpdateConsensus(SyncConsensus, TableConsensus, TileConsensus, Protocol):
    """What the ranks tell each other."""


class SharedStates(Protocol):
    """States that all ranks share."""

    def register(self, key: str, state: Stateful) -> None:
        """Make ``state`` part of what joiners receive."""

    def holds(self, target: object) -> bool:
        """True if user code has registered this object as a state."""

    def register_rollback(self, capture: Callable[[], Any], restore: Callable[[Any], None], name: str = "") -> None:
        """Undo for small state that user code moves on even when its step is lost."""


class Rates(Protocol):
    """Policies of the user's."""

    @property
    def rate_factor(self) -> float:
        """What they have multiplied learning rates by."""


class LeadingLoader(Protocol):
    """The loader that leads."""

    @property
    def info(self) -> LoaderInfo | None:
        """What it tells the job, None before there is one."""


class ModelParts(Protocol):
    """Where a model registers what belongs to it."""

    def keep_random(self) -> None:
        """Leave torch's generators as user code has seeded them."""

    @property
    def loaders(self) -> LeadingLoader:
        """The loaders."""

    @property
    def monitoring(self) -> Monitoring:
        """What is measured of the run's steps."""

    def add_hook(self, point: HookPoint, hook: Callable[[], None]) -> None:
        """Have ``hook`` called at every such point."""

    def ask_for_shares(self, least: int) -> None:
        """Have no worker train with fewer samples at once, where that can be."""

    def call(self, point: HookPoint) -> None:
        """The run is at such a point."""

    def add_buffers(self, buffers: SyncedBuffers) -> None:
        """A model's buffers."""

    def add_rate_factor(self, factor: Callable[[], float]) -> None:
        """What gives by how much the latest step of a model has multiplied its learning rates."""

    def adds_up_gradients(self) -> None:
        """The loop leaves gradients of one step for the next."""

    def add_signal(self, signal: Callable[[], NoiseSignal]) -> None:
        """Have ``signal`` give what rank 0 knows of a newly wrapped model's gradient signal."""

    def add_gradients(self, gradients: GroupDependent) -> None:
        """A model's gradients."""


class SyncedBuffers(Protocol):
    """Buffers that are made equal on all ranks."""

    @property
    def layout(self) -> object:
        """What must be the same on all ranks."""

    def __call__(self, communicator: Communicator) -> None:
        """Synchronise."""


class MadeSchedulers(Protocol):
    """Schedulers that were made in this process."""

    def schedulers_of(self, optimizer: torch.optim.Optimizer) -> Sequence[object]:
        """Those of an optimizer that are still there."""


class ModelRun(SyncContext, Protocol):
    """See the module's text."""

    @property
    def elastic(self) -> bool:
        """Whether the group may change."""

    def trained(self, module: torch.nn.Module) -> None:
        """The optimizer of a model steps."""

    @property
    def optimizers(self) -> MadeSchedulers:
        """Optimizers and schedulers of the process."""

    @property
    def group(self) -> UpdateGroup:
        """The present group."""

    @property
    def consensus(self) -> UpdateConsensus:
        """What the ranks tell each other."""

    @property
    def ledger(self) -> UpdateLedger:
        """Steps of this rank."""

    @property
    def states(self) -> SharedStates:
        """States that all ranks share."""

    @property
    def adaptation(self) -> Rates:
        """Policies of the user's."""

    @property
    def registry(self) -> ModelParts:
        """Hooks, buffers and gradients."""

    def add_model(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        info: ModelInfo,
        noise: Callable[[], NoiseScale | None],
    ) -> int:
        """Take part in the model's training; returns its number."""
