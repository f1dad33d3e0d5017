"""Run of a train function in one process: the shared base of its models, its steps and its changes of group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from elastic_ray.batch.limits import BatchChoice, bounded
from elastic_ray.batch.reports import ModelInfo
from elastic_ray.communication.round_shares import RoundShares
from elastic_ray.consensus.agreed_changes import AgreedChanges
from elastic_ray.consensus.consensus import RAN_OUT, RankConsensus
from elastic_ray.consensus.unit_wishes import UnitWishes
from elastic_ray.events import EventKind
from elastic_ray.faults import FaultInjector
from elastic_ray.membership.messages import RankInfo
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.monitoring.monitoring import Monitoring
from elastic_ray.run.controller_client import ControllerClient
from elastic_ray.run.group import Group
from elastic_ray.run.optimizers import OptimizerWatch
from elastic_ray.run.registry import HookPoint, Noise, Registry
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.replicas import Replicas
from elastic_ray.state.shared_state import SharedState
from elastic_ray.steps.clock import StepClock
from elastic_ray.steps.ledger import SampleTally, StepLedger, StepSums
from elastic_ray.stragglers.gpu_types import TypeShares
from elastic_ray.stragglers.slow_workers import StragglerConfig
from elastic_ray.stragglers.watch import StragglerWatch

if TYPE_CHECKING:
    import torch

    from elastic_ray.communication.unit_group import UnitGroup
    from elastic_ray.steps.step import LoaderStep


class Run:
    """Parts of a run. Rooms above take it whole; what is below takes the parts that it needs.

    Args:
        worker: id of this worker, unique in the job.
        membership: this worker's side of the membership protocol.
        controller: whom it tells of itself.
        progress: where to start.
        elastic: whether the group may change.
        fixed_batch: the batch stays as it is, also where the loader lets it adapt.
        faults: scripted faults, None outside tests.
        expected: where this worker will stand in the group that it is to join, as far as that is known.
        most_workers: that there may ever be; None in a group of fixed size.
        unit: of which this worker is one; None where each is a rank by itself.
        stragglers: what is done about slow workers.

    Attributes:
        states: what all ranks share.
        registry: what the train function has built.
        ledger: which step this rank is in.
        sums: what accumulators were given in steps that are not committed yet.
        tally: which samples a step has used.
        shares: which steps of a round this rank makes.
        unit, wishes: the unit, and what its workers know alike; None where each is a rank by itself.
        agreed: what the ranks have agreed on and not yet carried out.
        replicas: compares the wrapped models of the ranks.
        consensus: this rank's announcements and votes.
        clock: times of steps.
        meter: what all ranks know of each other's.
        stragglers: which workers are slow, and what share of a step's samples each takes.
        gpu_types: what share each takes of them because of its GPU's type.
        optimizers: optimizers and schedulers of the process.
        synced: whether this worker has become part of the job, with the first epoch.
        shape_changes: how often the group or the batch shape has changed.
        models: how many models the loop has wrapped.
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
            tell=lambda text, detail: self.tell(EventKind.STRAGGLER.value, text, detail),
            measure=meter.ask,
        )
        self.states.register("stragglers", self.stragglers)
        self.states.register("gpu_types", self.gpu_types)
        self.registry = Registry(monitoring, fixed_batch=fixed_batch)
        self.replicas = Replicas(lambda: self.registry.drifts)
        self.optimizers = OptimizerWatch(group, self.tell)
        self.consensus = RankConsensus(
            group,
            self.agreed,
            self.replicas,
            self.ledger,
            [meter, self.registry.saving, self.tally],
            warn=lambda text: self.tell("warning", text),
            is_last_epoch=lambda: self.states.progress.in_last_epoch,
        )

    @property
    def speaks(self) -> bool:
        """True if this worker speaks for its unit, or is one by itself."""
        return self.unit is None or self.unit.leads

    @property
    def voided(self) -> bool:
        """True if the present group was called off, as all workers of a unit know."""
        return self.membership.voided if self.wishes is None else self.wishes.voided

    def agree_in_unit(self, failure: str | None, *, saves: bool = False, measured: float = 0.0) -> str | None:
        """At one place of the program on all workers of a unit: why what they did fails, on one of them or more.

        Args:
            failure: why it fails on this one; None if it does not.
            saves: the state is to be saved, whether or not it is time.
            measured: how many parameter groups' statistics were, as all of them learn.
        """
        due = saves or self.registry.saving_is_due
        if self.wishes is None or self.wishes.settle(well=failure is None, due=due, measured=measured):
            return failure
        return failure or "another worker of the unit could not complete its step"

    @property
    def progress(self) -> RunProgress:
        """Progress of the run."""
        return self.states.progress

    def tell(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Notify the job's user, from rank 0; called on every rank."""
        if self.group.rank_info.rank == 0:
            self.controller.tell(kind, text, dict(detail or {}))

    def tell_once(self, kind: str, text: str, number: int) -> None:
        """Notify the user from any rank; of several that say the same under one number, the job hears the first."""
        self.controller.tell(kind, text, {"number": number})

    def moment(self, name: str) -> None:
        """Pass a named moment of the run, for scripted faults."""
        if self.faults is not None:
            self.faults.at(name, worker=self.worker, rank=self.group.rank, step=self.states.progress.steps)

    def refuse_in_round(self, what: str, way_out: str) -> None:
        """Raise RuntimeError if the loop is within a round, whose steps each rank makes by itself."""
        step = self.ledger.outermost
        if step is not None and step.leads and self.registry.drifting and self.registry.round_period > 1:
            raise RuntimeError(
                f"{what} in the loop over the training data under a strategy that averages models every "
                f"{self.registry.round_period} steps: each rank makes these steps by itself, and no other waits for it "
                f"there; {way_out}"
            )

    def mark_synced(self) -> None:
        """Mark this worker as part of the job."""
        self.synced = True

    def run_out_of_memory(self) -> bool:
        """Record that this rank ran out of memory in the step in progress; False if smaller micro-batches do not help.

        Where it has taken more than an equal share, or its gradients are averaged already, the group has to change.
        """
        step, info = self.ledger.outermost, self.registry.loaders.info
        if self.unit is not None:
            return False  # the others of the unit wait for this worker in collectives of the user's code
        if step is None or info is None or not step.leads or self.ledger.step is not step:
            return False
        if self.ledger.failed or self.agreed.ran_out:
            return True
        most = max(step.sizes[self.group.rank])
        least = 1 if info.limits.fixed else info.limits.lower
        if most <= least or most > step.equal_bsz:
            return False
        together = not (self.registry.meets_in_passes or self.registry.drifts or self.ledger.reduced)
        if self.group.world_size == 1 or (together and self.models == 1):
            self.agreed.run_out()
            if self.group.world_size == 1:
                self.ledger.fail(RAN_OUT)
            return True
        if not self.elastic:
            return False
        # The others are, or will be, in collectives that this rank cannot take part in: the group is formed anew.
        self.progress.bound_memory(most)
        cause = f"{RAN_OUT} with {most} samples at once; the local bound is now {self.progress.memory_bound}"
        self.ledger.fail(cause)
        self.controller.tell(EventKind.OUT_OF_MEMORY.value, cause, {"memory_bound": self.progress.memory_bound})
        return True

    def bound_memory(self, step: LoaderStep) -> None:
        """Bound the samples taken at once on all ranks, after a step that did not fit into a worker's memory."""
        failed, progress, info = max(map(max, step.sizes)), self.states.progress, self.registry.loaders.info
        progress.bound_memory(failed)
        assert info is not None and progress.memory_bound is not None, "the loader leads"
        cut = bounded(info.limits, step.shape, progress.memory_bound)
        before, now = step.shape.batch_size(self.group.world_size), cut.batch_size(self.group.world_size)
        way = f"steps have {cut.accum_steps + 1} micro-batches now"
        if now < before and not info.limits.fixed:
            way = f"the batch falls from {before} to {now}, which gradient_accumulation=True would keep"
        self.shape_changes += 1
        self.registry.call(HookPoint.SHAPE_CHANGED)
        self.tell(
            EventKind.OUT_OF_MEMORY.value,
            f"a worker ran out of memory with {failed} samples at once, and its step is drawn again; the local bound "
            f"is now {progress.memory_bound}: {way}",
            {"failed": failed, "memory_bound": progress.memory_bound},
        )

    def set_shape(self, shape: BatchChoice | None) -> None:
        """Set another batch shape from the next step on, None for the loader's own."""
        self.states.set_shape(shape)
        self.shape_changes += 1
        self.registry.call(HookPoint.SHAPE_CHANGED)

    def may_choose(self, number: int) -> bool:
        """True if this model's strategy may be chosen now: one at a time, because all share the timed steps."""
        return self.registry.have_chosen(number)

    def add_model(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, info: ModelInfo, noise: Noise
    ) -> int:
        """Participate in the training of a newly wrapped model; returns its number, in the order of wrapping.

        Args:
            optimizer: steps its parameters.
            info: what it tells the job.
            noise: gives its noise scale.

        Raises RuntimeError: training has begun. ValueError: the model shares parameters with another one.
        """
        if self.synced:
            raise RuntimeError(
                "AdaptiveDataParallel must wrap every model before the first epoch, so that all workers hold the same. "
                "For several trainings in one job (the folds of a cross-validation) wrap all their models first and "
                "divide one count of epochs among them: `for count in remaining_epochs_until(folds * epochs): "
                "fold, epoch = divmod(count, epochs)`; or submit a job each"
            )
        rates: Callable[[], tuple[float, ...]] = lambda: tuple(float(group["lr"]) for group in optimizer.param_groups)  # noqa: E731
        number = self.registry.models.add(info, noise, rates)
        self.models = number + 1
        self.replicas.add(module, optimizer)
        self.optimizers.add(optimizer)
        return number
