"""Builders of strategies that divide the optimizer state among the ranks, see ``builders`` (pure)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from elastic_ray.sync.builders import dense
from elastic_ray.sync.profile import ModelProfile, Topology
from elastic_ray.sync.spec import Owner, Strategy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """What these builders share."""

    copies: int = 2
    _NAME: ClassVar[str]
    _GRADIENTS: ClassVar[str] = "full"
    _CUT: ClassVar[str] = "equal"

    def __post_init__(self) -> None:
        _ = self._owner  # refuses what is out of range

    @property
    def _owner(self) -> Owner:
        return Owner(unit="tile", gradients=self._GRADIENTS, copies=self.copies, cut=self._CUT)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """See ``StrategyBuilder``."""
        return dense(self._owner, profile, self._NAME)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO1(_Tiles):
    """Gradients by all-reduce; the optimizer state in tiles that lie with some ranks each (ZeRO-1, SC 2020).

    In ZeRO each rank owns one slice. Here the state is cut into tiles, the same for every size of group, so that few of
    them move when it changes; and each tile has a second owner that makes the same updates, so that the loss of a
    worker loses nothing.

    Attributes:
        copies: owners of a tile.
    """

    _NAME: ClassVar[str] = "zero1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO2(_Tiles):
    """As ``ZeRO1``, with gradients that go to the owners of their tile alone (ZeRO-2, SC 2020).

    A rank sends each part of its gradient to one owner, which adds up and sends the sum to the second one. So ``.grad``
    has no elements: its 2-norm is known, clipping by that and AMP's ``GradScaler`` work as they are, and what needs the
    elements raises an error.

    Attributes:
        copies: owners of a tile.
    """

    _NAME: ClassVar[str] = "zero2"
    _GRADIENTS: ClassVar[str] = "sliced"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedPS(_Tiles):
    """Parts of each tensor have owners, which update them (AutoDist: PartitionedPS, synchronous).

    A tensor is divided along its first dimension, into as many parts as the smallest divisor of that from 2 on; a prime
    dimension into at most 64. AutoDist's parts lie with one server each, and gradients go to these. Here each part has
    ``copies`` owners among the ranks, and gradients are all-reduced, for code that clips them.

    Attributes:
        copies: owners of a part.
    """

    _NAME: ClassVar[str] = "partitioned_ps"
    _CUT: ClassVar[str] = "divisor"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPartitionedPS(_Tiles):
    """As ``PartitionedPS``, in as many parts as the smallest number that does not divide the first dimension.

    AutoDist: UnevenPartitionedPS.

    Attributes:
        copies: owners of a part.
    """

    _NAME: ClassVar[str] = "uneven_partitioned_ps"
    _CUT: ClassVar[str] = "uneven"
