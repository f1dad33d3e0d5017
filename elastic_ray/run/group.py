"""The group that a worker is in now, to read only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elastic_ray.communication.no_group import NoGroup
from elastic_ray.membership.messages import GenerationSpec, Member, RankInfo, Returned

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator
    from elastic_ray.membership.worker_side import WorkerMembership


class Group:
    """Present group of a worker. Its attributes are read many times in a step, and change with :meth:`follow` alone.

    Args:
        worker: id of this worker.
        expected: where this worker will stand in the first one, as far as that is known.
        most_workers: that there may ever be; None in a group of fixed size.

    Attributes:
        generation_spec: the present generation as announced, None before the first.
        generation: how often the group has changed, 0 before the first.
        rank: rank of this worker in the present generation; 0 before the first.
        world_size: number of ranks of the present generation; 1 before the first, and for who has left.
        communicator: the present generation's; where there is none, all that is asked of it raises RuntimeError.
        returned: workers that belong to the group no more, for their train functions have returned.
        members: the members of the present generation by rank; none before the first.
        nodes: the node of each rank of the present generation; before the first, of this worker alone.
        domains: the network's domain of each rank's node, likewise; empty where its label does not say.
        rank_info: where this worker stands in the present generation; before the first, where it is expected to.
        mixed: whether the present generation is on several types of GPU.
    """

    def __init__(
        self, worker: str, membership: WorkerMembership, expected: RankInfo, most_workers: int | None = None
    ) -> None:
        self._worker, self._membership, self._expected = worker, membership, expected
        self._most_workers = most_workers
        self.follow()

    def follow(self) -> None:
        """Enter, as the membership does, another group; a worker without one is alone."""
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
        """True if the present generation was announced because the one before had broken."""
        spec = self.generation_spec
        return spec is not None and 1 < spec.generation <= spec.void_below

    @property
    def equal_shares(self) -> bool:
        """True if the ranks must have equal shares of each step."""
        return self.generation_spec is not None and self.generation_spec.equal_shares

    @property
    def most_workers(self) -> int:
        """Largest number of ranks that the group may ever have: the same on all of them, also before they join."""
        return self.rank_info.world_size if self._most_workers is None else self._most_workers

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes given to the group's collectives, by operation; empty before the first generation."""
        return self.communicator.traffic if self.members else {}

    @property
    def sending_s(self) -> float:
        """Time in which the group's connections were sending [s]; 0 before the first generation."""
        return self.communicator.connections.sending_s() if self.members else 0.0
