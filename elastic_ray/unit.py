"""Units: groups of workers that start and end together, and the names of their mesh dimensions (pure)."""

from __future__ import annotations

import dataclasses
import math

from placement.checks import check_whole, plain_number
from placement.cluster.cluster import parts

_SAME_SAMPLES = ("tp", "pp", "cp", "ep")
_OWN_SAMPLES = ("shard",)
UNNAMED = "unit"
"""Name of the only dimension of a unit that is given by its size."""


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Unit:
    """Fixed group of workers that start and end together, as a mesh: ``Unit(pp=2, tp=4)`` has 8 workers.

    The last dimension changes fastest from rank to rank. Workers that differ in ``tp`` (tensor), ``pp`` (pipeline),
    ``cp`` (context) or ``ep`` (experts) read the same samples. Workers that differ in ``shard`` (torch's
    ``fully_shard``) each read their own part of the unit's samples.

    Args:
        **sizes: Number of workers along each dimension.

    Raises:
        TypeError: A size is not a whole number.
        ValueError: A size is below 1, a dimension has an unknown name, or there are no dimensions.

    Examples:
        >>> from elastic_ray import Unit
        >>> Unit(pp=2, tp=4).size
        8
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, **sizes: int) -> None:
        known = (*_SAME_SAMPLES, *_OWN_SAMPLES)
        if not sizes:
            raise ValueError(f"Unit must have a dimension, one of {', '.join(known)}: for example Unit(tp=2)")
        for name, size in sizes.items():
            if name not in known:
                raise ValueError(f"dimensions of a Unit must be of {', '.join(known)}, but got {name!r}")
            check_whole(f"Unit({name}=)", size, least=1, unit="workers")
        object.__setattr__(self, "names", tuple(sizes))
        object.__setattr__(self, "sizes", plain_number(tuple(sizes.values())))

    @property
    def size(self) -> int:
        """Number of workers in the unit."""
        return math.prod(self.sizes)

    @property
    def shards(self) -> int:
        """Number of equal parts (shards) that the unit's samples are divided into."""
        return math.prod(size for name, size in zip(self.names, self.sizes, strict=True) if name in _OWN_SAMPLES)

    def shard_of(self, position: int) -> int:
        """Return the index of the part of the unit's samples read by the worker at `position` (0-based)."""
        found, stride = 0, 1
        for name, size in reversed(list(zip(self.names, self.sizes, strict=True))):
            position, place = divmod(position, size)
            if name in _OWN_SAMPLES:
                found, stride = found + place * stride, stride * size
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlace:
    """Position of a worker process in its unit (fixed group of workers that start and end together).

    Attributes:
        names, sizes: Names and sizes of the unit's mesh dimensions.
        shard, shards: Index of the worker's part of the unit's samples, and the number of parts.
        store: File that the unit's workers use to find each other; empty if they are on several nodes.
    """

    position: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shard: int
    shards: int
    store: str

    @property
    def size(self) -> int:
        """Number of workers in the unit."""
        return math.prod(self.sizes)

    def fitting(self, batch_size: int) -> int:
        """Return the largest multiple of ``shards`` up to ``batch_size``; at least ``shards``, one sample each."""
        return max(batch_size - batch_size % self.shards, self.shards)

    def share(self, batch_size: int, samples: int | None, *, drop_last: bool) -> tuple[int, int]:
        """Return the index of the worker's part of the unit's samples, and the number of parts.

        Args:
            samples: Number of samples in the dataset; None if the dataset has no length or yields whole batches.
            drop_last: True if a short last step is left out. The dataset then need not divide equally.

        Raises:
            ValueError: The dataset or ``batch_size`` cannot be divided equally among the unit's workers.
        """
        if samples is None:
            raise ValueError(
                "an iterable dataset, or whole_batches=True, is not supported in units whose workers read parts of "
                f"their samples (Unit(shard={self.shards})): use a dataset with a length and equal parts, or a unit "
                "whose workers read the same (tp, pp, cp, ep)"
            )
        for what, count in (("the dataset", 0 if drop_last else samples), ("batch_size", batch_size)):
            if count % self.shards:
                raise ValueError(
                    f"{what} must be a multiple of the {self.shards} workers of Unit(shard={self.shards}), which take "
                    f"equal parts of each step, but got {count}; choose another, or drop_last=True"
                )
        return self.shard, self.shards


def place_in(unit: Unit | int, position: int, store: str) -> UnitPlace:
    """Return the place of the worker at `position` in a unit whose workers find each other through ``store``."""
    if isinstance(unit, int):
        return UnitPlace(position=position, names=(UNNAMED,), sizes=(unit,), shard=0, shards=1, store=store)
    return UnitPlace(
        position=position,
        names=unit.names,
        sizes=unit.sizes,
        shard=unit.shard_of(position),
        shards=unit.shards,
        store=store,
    )


def process_names(worker: str, unit: int) -> tuple[str, ...]:
    """Return the names of a worker's ``unit`` processes, for monitoring: ``w1``, ``w1.1``, ``w1.2``..."""
    return (worker, *(f"{worker}.{position}" for position in range(1, unit)))


def nodes_of(place: str, unit: int) -> tuple[str, ...]:
    """Return the nodes a worker's ``unit`` processes run on; ``place`` names one node or several, ``n1*4+n2*2``."""
    here = parts(place)
    return (place,) * unit if len(here) == 1 else tuple(node for node, count in here.items() for _ in range(count))


def worker_of(process: str) -> str:
    """Return the name of the worker that a process belongs to."""
    return process.partition(".")[0]
