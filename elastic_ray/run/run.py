"""Run of a train function in one process: shared components for its models, steps and group changes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_ray.batch.limits import BatchChoice, BatchLimits, bounded
from elastic_ray.batch.reports import ModelInfo
from elastic_ray.communication.connections import NoGroup
from elastic_ray.communication.ended_work import BACKEND
from elastic_ray.communication.model_exchange import ModelExchange
from elastic_ray.communication.round_shares import RoundShares
from elastic_ray.consensus.consensus import RAN_OUT, AgreedChanges, RankConsensus
from elastic_ray.consensus.unit_wishes import UnitWishes
from elastic_ray.events import EventKind
from elastic_ray.faults import FaultInjector
from elastic_ray.membership.messages import GenerationSpec, Member, RankInfo, Returned
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.monitoring.monitoring import Monitoring
from elastic_ray.run.controller_client import ControllerClient
from elastic_ray.run.current import session_of_thread
from elastic_ray.run.registry import HookPoint, ModelFacts, Registry
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.replicas import Replicas
from elastic_ray.state.shared_state import SharedState
from elastic_ray.steps.ledger import SampleTally, StepLedger, StepSums
from elastic_ray.steps.step import StepClock
from elastic_ray.stragglers.detection import StragglerConfig
from elastic_ray.stragglers.gpu_types import TypeShares
from elastic_ray.stragglers.watch import StragglerWatch
from placement.text import count

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator
    from elastic_ray.communication.unit_group import UnitGroup
    from elastic_ray.steps.step import LoaderStep


class Run:
    """Components of a run; higher layers receive all of them, lower layers only the components they need.

    Args:
        membership: This worker's side of the membership protocol.
        elastic: True if the group may change.
        fixed_batch: True if the batch size stays constant even if the loader allows it to adapt.
        faults: Injects scripted faults; None outside tests.
        expected: This worker's expected rank and world size in its first group, if known.
        most_workers: Largest number of workers that the job may ever have; None in a fixed-size group.
        unit: Unit that this worker belongs to; None if each worker is a rank by itself.
        stragglers: Configured response to slow workers.

    Attributes:
        states: State shared by all ranks.
        registry: Objects that the train function has built.
        sums: Contributions to accumulators in steps that are not committed yet.
        tally: Records the samples that a step has used.
        shares: Decides which steps of a round this rank executes.
        exchanges: Published and pulled models, with an entry for each model that is averaged in pairs.
        unit, wishes: The unit, and the requests that all its workers know; None if each worker is a rank by itself.
        agreed: Decisions that the ranks have agreed on but not carried out yet.
        replicas: Compares the ranks' wrapped models.
        consensus: This rank's announcements and votes.
        meter: Measurements of each rank, known to all ranks.
        stragglers: Detects slow workers, and sets each worker's share of a step's samples.
        gpu_types: Sets each worker's share according to its GPU's type.
        synced: True if this worker has joined the job, at its first epoch.
        shape_changes: Number of times the group or the batch shape has changed so far.
        models: Number of models that the loop has wrapped.
    """

    def __init__(
        self,
        worker: str,
        membership: WorkerMembership,
        controller: ControllerClient,
        *,
        progress: RunProgress,
        elastic: bool,
        fixed_batch: bool,
        faults: FaultInjector | None,
        job: str,
        expected: RankInfo,
        most_workers: int | None,
        unit: UnitGroup | None,
        stragglers: StragglerConfig,
    ) -> None:
        self.worker, self.job, self.elastic = worker, job, elastic
        self.membership, self.controller, self.faults = membership, controller, faults
        self.synced, self.shape_changes, self.models = False, 0, 0
        self.group = group = Group(worker, membership, expected, most_workers)
        self.states = SharedState(progress, position=unit.place.position if unit is not None else None)
        self.ledger = StepLedger(self.states, moment=self.moment if faults is not None else None)
        self.clock, self.sums, self.tally = StepClock(), StepSums(), SampleTally(self.ledger)
        self.shares = RoundShares()
        self.exchanges: list[ModelExchange] = []
        self.unit, self.wishes = unit, UnitWishes(membership, unit) if unit is not None else None
        self.agreed = AgreedChanges(membership if self.wishes is None else self.wishes)
        monitoring = Monitoring(lambda: group.traffic, lambda: group.sending_s)
        self.meter = meter = monitoring.meter
        self.gpu_types = TypeShares(
            members=lambda: group.members, measured=lambda: meter.workers, equal=lambda: group.equal_shares
        )
        self.stragglers = StragglerWatch(
            stragglers,
            members=lambda: group.members,
            equal=lambda: group.equal_shares,
            measured=self.gpu_types.comparable_measures,
            tell=lambda text, detail: self.notify(EventKind.STRAGGLER.value, text, detail),
            measure=meter.ask,
        )
        self.states.register("stragglers", self.stragglers)
        self.states.register("gpu_types", self.gpu_types)
        self.registry = Registry(monitoring, fixed_batch=fixed_batch)
        self.replicas = Replicas(lambda: self.registry.drifts)
        self.optimizers = OptimizerWatch(group, self.notify)
        self.consensus = RankConsensus(
            group,
            self.agreed,
            self.replicas,
            self.ledger,
            [meter, self.registry.saving, self.tally],
            warn=lambda text: self.notify("warning", text),
            is_last_epoch=lambda: self.states.progress.in_last_epoch,
        )

    @property
    def speaks(self) -> bool:
        """True if this worker represents its unit to the job, or is a rank by itself."""
        return self.unit is None or self.unit.leads

    @property
    def voided(self) -> bool:
        """True if the current group was cancelled and, in a unit, all workers of the unit know it."""
        return self.membership.voided if self.wishes is None else self.wishes.voided

    def agree_in_unit(self, failure: str | None, *, saves: bool = False, measured: float = 0.0) -> str | None:
        """Agree with the other workers of a unit on the reason why their work failed, if it did.

        All workers of the unit must call this at the same point in the program.

        Args:
            failure: Why the work failed on this worker; None if it succeeded.
            saves: Request a checkpoint even if none is due.
            measured: Number of parameter groups whose statistics this worker has measured, sent to the other workers.

        Returns the failure on this worker or another one; None if all succeeded.
        """
        due = saves or self.registry.saves()
        if self.wishes is None or self.wishes.complete(well=failure is None, due=due, measured=measured):
            return failure
        return failure or "another worker of the unit could not complete its step"

    @property
    def progress(self) -> RunProgress:
        """Progress of the run: its epoch, passes and committed steps."""
        return self.states.progress

    def notify(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Send a notice (its kind, text and detail) to the job's user from rank 0; called on every rank."""
        if self.group.rank_info.rank == 0:
            self.controller.notify(kind, text, dict(detail or {}))

    def notify_once(self, kind: str, text: str, number: int) -> None:
        """Send a notice from any rank; if several ranks send the same text and number, the job records one."""
        self.controller.notify(kind, text, {"number": number})

    def moment(self, name: str) -> None:
        """Inject the scripted faults that are due at the moment called ``name``; do nothing outside tests."""
        if self.faults is not None:
            self.faults.at(name, worker=self.worker, rank=self.group.rank, step=self.states.progress.steps)

    def refuse_in_round(self, what: str, way_out: str) -> None:
        """Raise RuntimeError if the loop is within a round (each rank makes a round's steps independently)."""
        step = self.ledger.outermost
        if step is not None and step.leads and self.registry.drifting and self.registry.round_period > 1:
            raise RuntimeError(
                f"{what} in the loop over the training data under a strategy that averages models every "
                f"{self.registry.round_period} steps: each rank makes these steps by itself, and no other waits for it "
                f"there; {way_out}"
            )

    def leave_group(self) -> None:
        """Close connections to other ranks, except the communicator's."""
        self.shares.close()
        for each in self.exchanges:
            each.close()

    def run_out_of_memory(self) -> bool:
        """Record that this rank ran out of memory in the current step, which is repeated with smaller micro-batches.

        Returns False, and records nothing, if that is impossible: in a unit, outside a step's own micro-batches, at the
        smallest micro-batch, or if this rank had more than an equal share.
        """
        step, info = self.ledger.outermost, self.registry.loaders.info
        if self.unit is not None:
            return False  # the others of the unit wait for this worker in collectives of the user's code
        if step is None or info is None or step.whole or self.ledger.step is not step:
            return False
        if self.ledger.failed or self.agreed.ran_out:
            return True
        most = max(step.sizes[self.group.rank])
        least = self.least_samples(step)
        if self.progress.bound_after(most, least) >= min(most, self.progress.memory_bound or most):
            return False  # it would be drawn again as it is
        if most > step.equal_bsz:
            return False
        together = not (self.registry.meets_in_passes or self.registry.drifts or self.ledger.reduced)
        if self.group.world_size == 1 or (together and self.models == 1):
            self.agreed.ran_out = True
            if self.group.world_size == 1:
                self.ledger.fail(RAN_OUT)
            return True
        if not self.elastic:
            return False
        # The others are, or will be, in collectives that this rank cannot take part in: the group is formed anew.
        self.progress.bound_memory(most, least)
        cause = f"{RAN_OUT} with {count(most, 'sample')} at once; the local bound is now {self.progress.memory_bound}"
        self.ledger.fail(cause)
        self.controller.notify(EventKind.OUT_OF_MEMORY.value, cause, {"memory_bound": self.progress.memory_bound})
        return True

    @property
    def evaluated_samples(self) -> int:
        """Number of samples that this rank has at once from a loader that divides batches for an evaluation; else 0."""
        step = self.ledger.step
        return 0 if step is None or step.whole or step.leads else max(step.sizes[self.group.rank])

    def least_samples(self, step: LoaderStep | None = None) -> int:
        """Fewest samples that a worker may process at once if memory is short: the loader's, two with BatchNorm."""
        info = self.registry.loaders.info if step is None or step.leads else None  # others' batches are fixed
        return max(self.registry.least_share, 1 if info is None else info.limits.least)

    def bound_memory(self, step: LoaderStep) -> None:
        """Limit the samples per forward pass on all ranks, after ``step`` exceeded a worker's memory."""
        failed, progress, info = max(map(max, step.sizes)), self.states.progress, self.registry.loaders.info
        progress.bound_memory(failed, self.least_samples(step))
        assert info is not None and progress.memory_bound is not None, "a step has a loader, and was bounded"
        limits = info.limits if step.leads else BatchLimits(init_batch_size=step.init_batch_size)
        cut = bounded(limits, step.shape, progress.memory_bound)
        before, now = step.shape.batch_size(self.group.world_size), cut.batch_size(self.group.world_size)
        way = f"steps have {cut.accum_steps + 1} micro-batches now"
        if now < before and not limits.fixed:
            way = f"the batch falls from {before} to {now}, which gradient_accumulation=True would keep"
        self.shape_changes += 1
        self.registry.call(HookPoint.SHAPE_CHANGED)
        self.notify(
            EventKind.OUT_OF_MEMORY.value,
            f"a worker ran out of memory with {count(failed, 'sample')} at once, and its step is drawn again; the "
            f"local bound is now {progress.memory_bound}: {way}",
            {"failed": failed, "memory_bound": progress.memory_bound},
        )

    def set_shape(self, shape: BatchChoice | None) -> None:
        """Use the batch shape ``shape`` from the next step on; None restores the loader's own shape."""
        self.states.shape = shape
        self.shape_changes += 1
        self.registry.call(HookPoint.SHAPE_CHANGED)

    def add_model(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, info: ModelInfo, facts: ModelFacts
    ) -> int:
        """Register a newly wrapped model; return its number, counted from 0 in order of wrapping.

        Raises:
            RuntimeError: Training has started.
            ValueError: The model shares parameters with another model.
        """
        if self.synced:
            raise RuntimeError(
                "AdaptiveDataParallel must wrap every model before the first epoch, so that all workers hold the same. "
                "For several trainings in one job (the folds of a cross-validation) wrap all their models first and "
                "divide one count of epochs among them: `for count in remaining_epochs_until(folds * epochs): "
                "fold, epoch = divmod(count, epochs)`; or submit a job each"
            )
        number = self.registry.models.add(info, facts)
        self.models = number + 1
        self.replicas.add(module, optimizer)
        self.optimizers.known.add(optimizer)
        return number


class Group:
    """Current group of a worker. Its attributes are read many times per step, and only :meth:`adapt` changes them.

    Attributes:
        generation_spec: The current generation as announced; None before the first.
        generation: Number of the current generation, 0 before the first.
        rank: Rank of this worker in the current generation; 0 before the first.
        world_size: Number of ranks in the current generation; 1 before the first, and for a worker that has left.
        communicator: Communicator of the current generation; without one, every call on it raises RuntimeError.
        returned: Workers that have left the group because their train functions returned.
        members: The members of the current generation, in rank order; empty before the first.
        nodes: The node of each rank in the current generation; before the first, one entry for this worker.
        domains: The network domain of each rank's node, as for ``nodes``; empty strings for nodes without the label.
        rank_info: This worker's rank and world size in the current generation; before the first, the expected ones.
        mixed: True if the current generation uses several types of GPU.
    """

    def __init__(
        self, worker: str, membership: WorkerMembership, expected: RankInfo, most_workers: int | None = None
    ) -> None:
        self._worker, self._membership, self._expected = worker, membership, expected
        self._most_workers = most_workers
        self.adapt()

    def adapt(self) -> None:
        """Switch to the membership's current group; a worker without a group is alone."""
        spec, communicator = self._membership.current, self._membership.communicator
        self.generation_spec: GenerationSpec | None = spec
        self.generation = spec.generation if spec is not None else 0
        self.returned: tuple[Returned, ...] = spec.returned if spec is not None else ()
        if spec is None or communicator is None:
            self.communicator: Communicator = NoGroup()  # type: ignore[assignment]
            self.rank, self.world_size = 0, 1
            self.members: tuple[Member, ...] = ()
            self.nodes: tuple[str, ...] = ("",)
            self.domains: tuple[str, ...] = ("",)
            self.rank_info, self.mixed = self._expected, False
            return
        self.communicator = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.members, self.nodes = spec.members, tuple(member.node for member in spec.members)
        self.domains = tuple(member.domain for member in spec.members)
        self.rank_info = spec.place_of(self._worker)
        self.mixed = len({member.gpu_type for member in spec.members}) > 1

    @property
    def replaces_broken(self) -> bool:
        """True if the current generation was announced because the previous one had broken."""
        spec = self.generation_spec
        return spec is not None and 1 < spec.generation <= spec.void_below

    @property
    def equal_shares(self) -> bool:
        """True if the ranks must have equal shares of each step's samples."""
        return self.generation_spec is not None and self.generation_spec.equal_shares

    @property
    def most_workers(self) -> int:
        """Largest number of ranks that the group may ever have; the same on all ranks, even before they join."""
        return self.rank_info.world_size if self._most_workers is None else self._most_workers

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes passed to the group's collectives, keyed by operation; empty before the first generation."""
        return self.communicator.traffic if self.members else {}

    @property
    def sending_s(self) -> float:
        """Time that the group's connections have spent sending [s]; 0 before the first generation."""
        return self.communicator.connections.sending_s() if self.members else 0.0


_installed = False


def watch_optimizers() -> None:
    """Install a hook that lets a thread's session inspect every step of any optimizer in this process.

    The hook is never removed, because torch iterates over its hooks during a step and cannot handle a removal then.
    """
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_on_step)
        for kind in (LRScheduler, ReduceLROnPlateau, torch.optim.Optimizer):
            _record_made(kind)


def _record_made(kind: Any) -> None:
    """Patch a class of schedulers or optimizers so that the thread's session is notified of each new object."""
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        session = session_of_thread()
        if session is None:
            return
        if isinstance(self, torch.optim.Optimizer):
            if session.synced:
                session.optimizers.late.add(self)
        elif (optimizer := getattr(self, "optimizer", None)) is not None:
            session.optimizers.made(self, optimizer, late=session.synced and session.elastic)

    setattr(kind, "__init__", __init__)  # noqa: B010


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    session = session_of_thread()
    if session is not None:
        session.optimizers.check_stepping(optimizer)


class OptimizerWatch:
    """Detector of unwrapped optimizers that step in a group that has, or may get, several workers.

    Each worker has its own samples, so the replicas of a model that is not synchronised diverge.

    Attributes:
        late: Optimizers made after the first epoch has started; the models that they train are each worker's own.
    """

    def __init__(self, group: Group, tell: Callable[[str, str], None]) -> None:
        self._group, self._tell = group, tell
        self.known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.late: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._told: set[str] = set()  # warnings, without the optimizer's name
        self._schedulers: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[Any]]]
        self._schedulers = weakref.WeakKeyDictionary()

    def made(self, scheduler: Any, optimizer: torch.optim.Optimizer, *, late: bool) -> None:
        """Check a newly made scheduler; ``late`` is True if training has started in a group that may change.

        Raises RuntimeError if ``late`` is True and the scheduler's optimizer belongs to a wrapped model.
        """
        if late and optimizer in self.known:
            raise RuntimeError(
                f"a {type(scheduler).__name__} was made for the optimizer of a wrapped model after the start of the "
                "first epoch: workers that join later, and the job when it starts again, would continue with another "
                "schedule. Make all schedulers before the model is wrapped, and pass them as lr_scheduler=; stages "
                "that follow each other are one torch.optim.lr_scheduler.SequentialLR, and a new one in each epoch is "
                "one LambdaLR over all steps"
            )
        self._schedulers[optimizer] = [*map(weakref.ref, self.schedulers_of(optimizer)), weakref.ref(scheduler)]

    def schedulers_of(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Return the schedulers of an optimizer that were made in this run and still exist."""
        return [each for made in self._schedulers.get(optimizer, ()) if (each := made()) is not None]

    def check_stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step.

        Raises RuntimeError if it steps a model that is not wrapped, or is wrapped with another optimizer.
        """
        if not self._group.generation or optimizer in self.known or optimizer in self._checked:
            return
        most = max(self._group.world_size, self._group.most_workers)
        wrapped, name = list(self.known), type(optimizer).__name__
        # SAM keeps one as an attribute, whose state the run knows of.
        if most == 1 or any(optimizer in vars(each).values() for each in wrapped):
            self._checked.add(optimizer)
            return
        known = {id(p) for each in wrapped for group in each.param_groups for p in group["params"]}
        allowed = torch.distributed.is_initialized() and torch.distributed.get_backend() != BACKEND  # torch's own DDP
        if all(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            allowed = any(each in vars(optimizer).values() for each in wrapped)  # it leaves the steps to that one
            text = (
                f"{name} steps parameters of a wrapped model, which is wrapped with another optimizer: nothing undoes "
                "its own part of lost steps, and workers that join later get nothing of its state. Wrap the model with "
                "the optimizer that steps; one that takes turns with others has them as attributes"
            )
        else:
            allowed |= optimizer in self.late
            text = (
                f"{name} steps parameters that AdaptiveDataParallel does not know, in a job of up to {most} workers: "
                "each trains a copy of its own on its own share of the samples, and workers that join later get none. "
                "Wrap the model: model = elastic_ray.AdaptiveDataParallel(model, optimizer); a tensor without a model, "
                "such as a temperature, as torch.nn.ParameterList([tensor]). For a model that is each worker's own, "
                "make the optimizer within the epochs (a copy does not count)"
            )
        if not allowed:
            raise RuntimeError(text)
        self._checked.add(optimizer)
        if (kind := text.removeprefix(name)) not in self._told:
            self._told.add(kind)
            self._tell("warning", text)
