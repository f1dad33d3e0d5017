"""Messages of the membership protocol as plain values (docs/protocol.md), and the transfer schedule (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from elastic_ray.batch.limits import BatchChoice
from placement.cluster.jobs import FoundStrategy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Worker in a generation; its rank is its index in :attr:`GenerationSpec.members`."""

    worker: str
    node: str
    domain: str = ""  # part of the network that the node is in, as its label says
    gpu_type: str = ""  # of the node's GPUs, in a job whose shares follow the types' speeds; else empty
    speed: float = 0.0  # of one worker on this type, as the job's model has it [samples/s]; 0 where that is not known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Position of a worker in its group; the defaults describe a single worker."""

    rank: int = 0
    world_size: int = 1  # workers of the group
    local_rank: int = 0  # its rank among those on its node
    local_world_size: int = 1  # workers on its node
    node_rank: int = 0  # index of its node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """Rank and progress of a worker whose train function has returned."""

    rank: int
    steps: int  # committed steps of all loaders


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """Generation (numbered list of a job's workers) as announced by the controller. Numbers only ever increase."""

    generation: int  # number of the generation, from 1
    members: tuple[Member, ...]  # its workers in rank order: those that stay first, so that rank 0 always holds state
    # generations under this number are broken; a worker that waits in one gives up at once. 0 announces a planned
    # change, which takes effect when all ranks agree on the step.
    void_below: int = 0
    batch: BatchChoice | None = None  # batch shape from the first step on; None keeps the loader's own choice
    equal_shares: bool = False  # no rank takes more of a step than others from now on, however slow they are
    critical_batch: int = 0  # that the job's branches have measured [samples]; 0 where none have
    reason: str = ""  # why, as a sentence
    returned: tuple[Returned, ...] = ()  # workers of earlier generations whose train function has returned

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.members)

    def rank_of(self, worker: str) -> int | None:
        """Return the rank of a worker; None if the worker is not a member of this generation."""
        return next((rank for rank, member in enumerate(self.members) if member.worker == worker), None)

    def place_of(self, worker: str) -> RankInfo:
        """Return the position of a member in the group; nodes are numbered in the order of their first ranks."""
        rank = self.rank_of(worker)
        if rank is None:
            raise ValueError(f"worker must be a member of generation {self.generation}, but got {worker!r}")
        nodes = [member.node for member in self.members]
        return RankInfo(
            rank=rank,
            world_size=self.world_size,
            local_rank=nodes[:rank].count(nodes[rank]),
            local_world_size=nodes.count(nodes[rank]),
            node_rank=list(dict.fromkeys(nodes)).index(nodes[rank]),
        )

    @property
    def nodes(self) -> int:
        """Number of distinct nodes."""
        return len({member.node for member in self.members})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Message from the controller that a planned generation has been cancelled, because a joiner died or was late."""

    generation: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchProposal:
    """Message from the controller that requests a different batch shape; rank 0 applies it to the next step."""

    generation: int
    batch: BatchChoice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticalBatch:
    """Message with the critical batch (largest fully efficient batch) that the job's branches have measured."""

    batch_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopJob:
    """Message from the controller to end the job cleanly after the current step.

    Attributes:
        save: True if the job is being preempted: rank 0 first saves the state, so that the job can continue later.
    """

    save: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StrategiesKnown:
    """Message with the fastest strategies that earlier jobs have found, keyed by model number and kind of group."""

    strategies: Mapping[str, FoundStrategy]


ControllerMessage = GenerationSpec | Cancel | BatchProposal | CriticalBatch | StopJob | StrategiesKnown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateVersion:
    """Version of a worker's training state. A higher version is further along in training."""

    step: int = 0  # committed optimizer steps (loader iterations)
    optimizers_stepped: int = 0  # optimizers already stepped within the step in progress (a GAN has two)
    # which average of models was the last that it has been through, where ranks train by themselves between averages;
    # larger is later, and 0 is none. It tells whose models count, not who is further.
    averaged: int = 0
    # generation of the last commit: of two groups that continued from the same step without knowing of each other, the
    # later one counts
    lineage: int = 0
    # ended loader passes. Among equal states it tells who has left a pass that others are leaving still.
    passes: int = 0
    has_state: bool = False  # whether the worker holds a trained state at all; a newcomer does not
    # whether accumulators hold what they were given in the last step: one that a rank has counted by itself lacks it
    has_sums: bool = True

    def order(self) -> tuple[int, int, int, int, bool]:
        """Return a sort key that increases with the version and is lowest for workers without a state."""
        return (int(self.has_state), self.step, self.optimizers_stepped, self.lineage, self.has_sums)


def transfer_rounds(progress: Sequence[StateVersion]) -> list[list[tuple[int, int]]]:
    """Return rounds of ``(source rank, destination rank)`` that give every rank the most advanced state.

    Ranks with the most advanced version are holders; all others are receivers. Receivers include survivors that did not
    complete the last step. In each round, every holder sends to one receiver, so h holders serve n receivers in
    ceil(log2((n + h) / h)) rounds. If some holders have already left a loader pass, the holders that are still leaving
    it do not send, because a newcomer would remain in that pass forever. If no rank holds a trained state (in the first
    generation, or after a restart from a checkpoint), rank 0 is the source.
    """
    furthest = max(p.order() for p in progress)
    holders = [rank for rank, p in enumerate(progress) if p.order() == furthest] if furthest[0] else [0]
    needers = [rank for rank in range(len(progress)) if rank not in set(holders)]
    passes = max(progress[rank].passes for rank in holders)
    holders = [rank for rank in holders if progress[rank].passes == passes]
    rounds: list[list[tuple[int, int]]] = []
    while needers:
        served = list(zip(holders, needers, strict=False))
        rounds.append(served)
        holders = holders + [destination for _, destination in served]
        needers = needers[len(served) :]
    return rounds
