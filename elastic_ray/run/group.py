"""The group that a worker is in now, to read only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elastic_ray.communication.communicator import Communicator
from elastic_ray.membership.messages import GenerationSpec, Member, RankInfo, Returned

if TYPE_CHECKING:
    from elastic_ray.membership.worker_side import WorkerMembership


class Group:
    """See the module's text.

    Args:
        worker: id of this worker.
        membership: knows the generation.
        expected: where this worker will stand in the first one, as far as that is known.
        most_workers: that there may ever be; None in a group of fixed size.
    """

    def __init__(
        self, worker: str, membership: WorkerMembership, expected: RankInfo, most_workers: int | None = None
    ) -> None:
        self._worker = worker
        self._membership = membership
        self._expected = expected
        self._most_workers = most_workers

    @property
    def generation(self) -> int:
        """How often the group has changed, 0 before the first."""
        return self._membership.generation

    @property
    def generation_spec(self) -> GenerationSpec | None:
        """The present generation as announced, None before the first."""
        return self._membership.current

    @property
    def replaces_broken(self) -> bool:
        """Whether the present generation was announced because the one before had broken."""
        spec = self._membership.current
        return spec is not None and 1 < spec.generation <= spec.void_below

    @property
    def equal_shares(self) -> bool:
        """Whether its ranks are to have equal shares of each step."""
        spec = self._membership.current
        return spec is not None and spec.equal_shares

    @property
    def returned(self) -> tuple[Returned, ...]:
        """Workers that belong to the group no more, for their train functions have returned."""
        spec = self._membership.current
        return spec.returned if spec is not None else ()

    @property
    def rank(self) -> int:
        """Rank of this worker in the present generation; 0 before the first."""
        communicator = self._membership.communicator
        return communicator.rank if communicator is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the present generation; 1 before the first."""
        communicator = self._membership.communicator
        return communicator.world_size if communicator is not None else 1

    @property
    def most_workers(self) -> int:
        """Number of ranks that the group may ever have: the same on all of them, also before they join."""
        return self.rank_info.world_size if self._most_workers is None else self._most_workers

    @property
    def rank_info(self) -> RankInfo:
        """Where this worker stands in the present generation; before the first, where it is expected to."""
        spec = self._membership.current
        if spec is None or self._membership.communicator is None:
            return self._expected
        return spec.place_of(self._worker)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank of the present generation; before the first, of this worker alone."""
        spec = self._membership.current
        if spec is None or self._membership.communicator is None:
            return ("",)
        return tuple(member.node for member in spec.members)

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the present generation by rank; none before the first."""
        spec = self._membership.current
        return spec.members if spec is not None and self._membership.communicator is not None else ()

    @property
    def communicator(self) -> Communicator:
        """The present generation's communicator.

        Raises:
            RuntimeError: there is none yet.
        """
        if self._membership.communicator is None:
            raise RuntimeError("the session has not entered a generation yet")
        return self._membership.communicator

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes that its collectives were given, by operation; empty before the first generation."""
        communicator = self._membership.communicator
        return communicator.traffic.bytes if communicator is not None else {}

    @property
    def sending_s(self) -> float:
        """Time in which its connections were sending [s]; 0 before the first generation."""
        communicator = self._membership.communicator
        return communicator.connections.sending_s() if communicator is not None else 0.0
