"""The parts of one run of a train function that its steps and its changes of group go through."""

from __future__ import annotations

import dataclasses

from elastic_ray.consensus.changes import AgreedChanges
from elastic_ray.consensus.consensus import RankConsensus
from elastic_ray.monitoring.step_meter import StepMeter
from elastic_ray.session.adaptation import Adaptation
from elastic_ray.session.group import Group
from elastic_ray.session.registry import Registry
from elastic_ray.state.shared_state import SharedState
from elastic_ray.steps.clock import StepClock
from elastic_ray.steps.ledger import StepLedger
from elastic_ray.steps.sums import StepSums


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
