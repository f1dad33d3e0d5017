"""Layouts that ranks must share: registered states by name, and the data; and how two differ (pure)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from elastic_ray.state.compared_facts import Facts

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator

_NAMED = 5
_DIGEST_BYTES = 5
_WAY_OUT = (
    "Each rank takes its share of an order of its own, so that samples are left out and others used twice. Give "
    "AdaptiveDataLoader the same whole dataset and the same arguments on every worker, whatever its rank, and let it "
    "share the samples out: sort what comes from a set or a directory listing, seed random_split, shuffles and "
    "generated data alike, and do not cut the dataset by rank"
)


class ReplicasDifferError(RuntimeError):
    """Error raised if ranks hold different parameters after the same steps, or different data."""


def digest(what: object) -> int:
    """Return a number of 40 bits that stands for the text of ``what``; 0 for nothing."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=_DIGEST_BYTES).digest(), "big")


def packed(layout: Mapping[str, str]) -> bytes:
    """Return the layout as text."""
    return json.dumps(layout, sort_keys=True).encode()


def difference(layouts: Mapping[int, bytes]) -> str:
    """Return how the layouts of two ranks differ, as the text of an error.

    Args:
        layouts: packed layouts of the two, by rank.
    """
    (one, ones), (other, others) = ((rank, json.loads(text)) for rank, text in sorted(layouts.items()))
    names = [name for name in dict.fromkeys([*ones, *others]) if ones.get(name) != others.get(name)]
    told = [
        f"{name} is {_shown(ones, name)} on rank {one} and {_shown(others, name)} on rank {other}" for name in names
    ]
    more = f"; and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return (
        "every rank must build the same models, optimizers and schedulers before its first epoch, but "
        f"{'; '.join(told[:_NAMED])}{more}"
    )


def check_samples(samples: Sequence[int], joins: Sequence[bool] = ()) -> None:
    """Check that all ranks have a dataset of the same length, because they divide it by position.

    Args:
        samples: of an epoch, by rank; below 0 where a rank does not know them.
        joins: True for ranks that join others.

    Raises ReplicasDifferError: two ranks know different ones.
    """
    known = {rank: count for rank, count in enumerate(samples) if count >= 0}
    one = next(iter(known), 0)
    other = next((rank for rank, count in known.items() if count != known[one]), None)
    if other is not None:
        one_joins, other_joins = (", which joins" if joins and joins[rank] else "" for rank in (one, other))
        raise ReplicasDifferError(
            f"every worker must train on the same dataset, but the training loader's has {known[one]} samples on rank "
            f"{one}{one_joins} and {known[other]} on rank {other}{other_joins}: each would take its share of another "
            "order, so that samples are left out and others used twice. Build it from the same files on every worker, "
            "and let the loader share it out"
        )


class DataPlan(Facts):
    """Facts about a pass over a loader."""

    __slots__ = ()

    def compare(self, communicator: Communicator, fingerprints: Sequence[int]) -> None:
        """Compare with the fingerprints that all ranks have announced; 0 is an unknown one.

        Raises:
            CommunicationFailedError: the group broke meanwhile.
            ReplicasDifferError: the facts differ; raised on every rank.
        """
        if text := self.difference(communicator, fingerprints):
            raise ReplicasDifferError(
                f"every worker must train on the same data in the same order, but {text}. {_WAY_OUT}"
            )


def check_ends(fingerprints: Sequence[int]) -> None:
    """Compare what the ranks hold after the last epoch.

    Args:
        fingerprints: of their parameters, by rank; 0 where one has told none.

    Raises ReplicasDifferError: they differ.
    """
    known = {rank: value for rank, value in enumerate(fingerprints) if value}
    if len(set(known.values())) > 1:
        common = max(known.values(), key=lambda value: (fingerprints.count(value), -fingerprints.index(value)))
        others = ", ".join(str(rank) for rank, value in known.items() if value != common)
        raise ReplicasDifferError(
            f"the result of rank 0 stands for all ranks, but when the loop over epochs was left, rank(s) {others} held "
            "other parameters, or trained them in another way, than the others: something in the last steps follows "
            "from rank, clock, own samples or unseeded random numbers"
        )


def _shown(layout: Mapping[str, str], name: str) -> str:
    return layout.get(name, "missing")
