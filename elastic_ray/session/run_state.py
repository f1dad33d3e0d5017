"""The parts of one run of a train function that its steps and its changes of group go through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_ray.consensus.changes import AgreedChanges
from elastic_ray.consensus.consensus import RankConsensus
from elastic_ray.events import EventKind
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.monitoring.measures import WorkerMeasures
from elastic_ray.monitoring.monitoring import Monitoring
from elastic_ray.monitoring.step_meter import StepMeter
from elastic_ray.session.adaptation import Adaptation
from elastic_ray.session.group import Group
from elastic_ray.session.registry import Registry
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.replicas import Replicas
from elastic_ray.state.shared_state import SharedState
from elastic_ray.steps.clock import StepClock
from elastic_ray.steps.ledger import StepLedger
from elastic_ray.steps.sums import StepSums
from elastic_ray.stragglers.gpu_types import TypeShares
from elastic_ray.stragglers.reports import StragglerConfig
from elastic_ray.stragglers.watch import StragglerWatch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """See the module's text.

    Attributes:
        group: the present group.
        states: what all ranks share.
        registry: what the train function has built.
        ledger: which step this rank is in.
        sums: what accumulators were given in steps that are not committed yet.
        agreed: what the ranks have agreed on and not yet carried out.
        consensus: this rank's announcements and votes.
        clock: times of steps.
        meter: what all ranks know of each other's.
        adaptation: policies of the user's.
        stragglers: which workers are slow, and what share of a step's samples each takes.
        gpu_types: what share each takes of them because of its GPU's type.
    """

    group: Group
    states: SharedState
    registry: Registry
    ledger: StepLedger
    sums: StepSums
    agreed: AgreedChanges
    consensus: RankConsensus
    clock: StepClock
    meter: StepMeter
    adaptation: Adaptation
    stragglers: StragglerWatch
    gpu_types: TypeShares[WorkerMeasures]


class TellUser(Protocol):
    """Tells the job's user something, from rank 0."""

    def __call__(self, kind: str, text: str, detail: Mapping[str, Any] | None = None) -> None: ...


def make_run_state(
    group: Group,
    membership: WorkerMembership,
    progress: RunProgress,
    replicas: Replicas,
    *,
    elastic: bool,
    fixed_batch: bool,
    stragglers: StragglerConfig,
    adaptation: Adaptation,
    moment: Callable[[str], None],
    tell: TellUser,
) -> RunState:
    """The parts of a run that begins at ``progress``; see :class:`elastic_ray.session.session.Session`."""
    states = SharedState(progress)
    ledger = StepLedger(states, recoverable=elastic, moment=moment)
    agreed = AgreedChanges(membership)
    monitoring = Monitoring(lambda: group.traffic, lambda: group.sending_s)
    meter = monitoring.meter

    def equal_shares() -> bool:
        return group.generation_spec is not None and group.generation_spec.equal_shares

    gpu_types = TypeShares(members=lambda: group.members, measured=lambda: meter.workers, equal=equal_shares)
    watch = StragglerWatch(
        stragglers,
        members=lambda: group.members,
        equal=equal_shares,
        measured=gpu_types.comparable_measures,
        tell=lambda text, detail: tell(EventKind.STRAGGLER.value, text, detail),
        measure=meter.ask,
    )
    states.register("stragglers", watch)
    states.register("gpu_types", gpu_types)
    registry = Registry(monitoring, fixed_batch=fixed_batch)
    riders = (meter, adaptation.runner.watched, adaptation.runner.ballot, registry.saving)
    return RunState(
        group=group,
        states=states,
        registry=registry,
        ledger=ledger,
        sums=StepSums(),
        agreed=agreed,
        consensus=RankConsensus(
            lambda: group.communicator,
            lambda: group.world_size,
            agreed,
            replicas,
            ledger,
            riders,
            warn=lambda text: tell("warning", text),
            is_last_epoch=lambda: states.progress.in_last_epoch,
        ),
        clock=StepClock(),
        meter=meter,
        adaptation=adaptation,
        stragglers=watch,
        gpu_types=gpu_types,
    )
