"""What decides which samples a pass uses and in which order: ranks that differ in it are told in what (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ray.communication.communicator import Communicator
from elastic_ray.state.facts import Facts
from elastic_ray.state.layout import ReplicasDifferError

_WAY_OUT = (
    "Each rank takes its share of an order of its own, so that samples are left out and others used twice. Give "
    "AdaptiveDataLoader the same whole dataset and the same arguments on every worker, whatever its rank, and let it "
    "share the samples out: sort what comes from a set or a directory listing, seed random_split, shuffles and "
    "generated data alike, and do not cut the dataset by rank"
)


class DataPlan(Facts):
    """Facts about a pass over a loader."""

    __slots__ = ()

    def compare(self, communicator: Communicator, fingerprints: Sequence[int]) -> None:
        """Compare with the other ranks' facts, all of which have announced fingerprints; 0 is an unknown one.

        Raises:
            CommunicationFailedError: the group broke meanwhile.
            ReplicasDifferError: the facts differ; raised on every rank.
        """
        if text := self.difference(communicator, fingerprints):
            raise ReplicasDifferError(
                f"every worker must train on the same data in the same order, but {text}. {_WAY_OUT}"
            )
