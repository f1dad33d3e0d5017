"""Where a worker stands, in Lightning's words."""

from __future__ import annotations

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from elastic_ray.loop.api import get_context


class ElasticRayEnvironment(ClusterEnvironment):
    """Ranks and sizes of the present group: each look tells those of now."""

    @property
    def creates_processes_externally(self) -> bool:
        """The job has started this process."""
        return True

    @property
    def main_address(self) -> str:
        """Not used: there is no default process group."""
        return ""

    @property
    def main_port(self) -> int:
        """Not used: there is no default process group."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Chosen by the strategies only."""
        return False

    def world_size(self) -> int:
        """Workers of the present group."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """The job says it."""

    def global_rank(self) -> int:
        """This worker's rank."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """The job says it."""

    def local_rank(self) -> int:
        """Its rank among those on its node."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Index of its node in the job."""
        return get_context().get_node_rank()
