"""Builders of strategies, with AutoDist's and KungFu's names: from a model and a group to a ``Strategy`` (pure).

Each says in its docstring what it was called where it comes from, and what is different here.
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar, Protocol

from elastic_ray.sync.checks import StrategyError, check_count, check_flag
from elastic_ray.sync.plan import ModelProfile, Topology
from elastic_ray.sync.spec import NATIVE, Average, Owner, Reduce, Rows, Rule, Strategy, Wire
from placement.checks import check_whole


class StrategyBuilder(Protocol):
    """Protocol of a strategy builder: makes a strategy for a model.

    Builders of your own are welcome wherever a strategy is.

    Examples:
        >>> from elastic_ray.sync import Strategy
        >>> class Plain:
        ...     def build(self, profile, topology):
        ...         return Strategy(name="plain")
        ...
        >>> Plain().build(None, None).name
        'plain'
    """

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; equal on every rank that calls it with equal arguments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """All-reduce of every gradient in flat buckets, as torch DDP does (AutoDist: AllReduce).

    Attributes:
        bucket_bytes: size of a bucket, see ``Reduce``; AutoDist's ``chunk_size`` counts variables instead.
        wire: form of the gradients.
        topology: the way of the gradients through the group, see ``Reduce`` (KungFu's strategies).

    Examples:
        >>> from elastic_ray.sync import AllReduce
        >>> AllReduce(bucket_bytes=1 << 20).bucket_bytes
        1048576
    """

    bucket_bytes: int = 25 << 20
    wire: Wire = NATIVE
    topology: str = "native"

    def __post_init__(self) -> None:
        _ = self._reduce  # refuses what is out of range

    @property
    def _reduce(self) -> Reduce:
        return Reduce(bucket_bytes=self.bucket_bytes, wire=self.wire, topology=self.topology)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        way = "all_reduce" if self.topology == "native" else self.topology
        return dense(self._reduce, profile, self.wire.name or way)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Matrices as products of two of low rank, with error feedback (Vogels et al., NeurIPS 2019).

    Attributes:
        rank: of the approximation; 4 is usual.

    Examples:
        >>> from elastic_ray.sync import PowerSGD
        >>> PowerSGD(rank=2)
        PowerSGD(rank=2)
    """

    rank: int = 4

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, least=1, error=StrategyError)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return dense(Reduce(wire=Wire(rank=self.rank)), profile, "powersgd")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PS:
    """Gradients are added up on rank 0, which sends the mean back: the traffic of one parameter server (AutoDist: PS).

    All ranks update. AutoDist's server holds and updates the parameters, and may do it asynchronously.
    """

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return dense(Owner(placement="first"), profile, "ps")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PSLoadBalancing:
    """Each rank adds up the gradients of some tensors, balanced by bytes (AutoDist: PSLoadBalancing); see ``PS``."""

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return dense(Owner(placement="balanced"), profile, "ps_balanced")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedAR:
    """Each bucket in several all-reduces at once, for links that one stream does not fill (AutoDist: PartitionedAR).

    Attributes:
        parts: how many. AutoDist takes the smallest divisor of the first dimension, which is all of a prime one.
    """

    parts: int = 4

    def __post_init__(self) -> None:
        Reduce(parts=self.parts)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return dense(Reduce(parts=self.parts), profile, "partitioned_ar")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomAxisPartitionAR:
    """Variant of ``PartitionedAR`` along an axis that a seed chooses for each tensor (AutoDist: RandomAxisPartitionAR).

    Attributes:
        parts: how many.
        seed: of the choice; AutoDist's is another one on each run.
    """

    parts: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        Reduce(parts=self.parts, axis=-1, seed=self.seed)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return dense(Reduce(parts=self.parts, axis=-1, seed=self.seed), profile, "random_axis_partition_ar")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallax:
    """Touched rows of embedding tables, all-reduce for the rest (Parallax, EuroSys 2019; AutoDist: Parallax).

    Attributes:
        update: see ``Rows``.
        wire: form of the other gradients.

    Examples:
        >>> from elastic_ray.sync import Parallax
        >>> Parallax().update
        'auto'
    """

    update: str = "auto"
    wire: Wire = NATIVE

    def __post_init__(self) -> None:
        Rows(update=self.update)
        Reduce(wire=self.wire)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return Strategy(
            rules=tuple(
                Rule(pattern=exactly(name), sync=Rows(update=self.update))
                for param in profile.params
                if (param.sparse or param.table) and len(param.shape) == 2
                for name in param.names
            ),
            default=Reduce(wire=self.wire),
            name="parallax",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD:
    """Strategy that averages models every few steps (Stich, ICLR 2019).

    Attributes:
        period: steps between two averages.
        give_back: as of ``Average``.

    Examples:
        >>> from elastic_ray.sync import LocalSGD
        >>> LocalSGD(period=8)
        LocalSGD(period=8, give_back=True)
    """

    period: int = 4
    give_back: bool = True

    def __post_init__(self) -> None:
        _ = self._average  # refuses what is out of range

    @property
    def _average(self) -> Average:
        return Average(algorithm="local_sgd", period=self.period, give_back=self.give_back)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return Strategy(average=self._average, name="local_sgd")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo:
    """Local steps, then an outer Nesterov step of their mean (Douillard et al., arXiv 2311.08105).

    Attributes:
        period: steps between two outer ones.
        outer_lr: its learning rate.
        outer_momentum: its momentum.
        give_back: as of ``Average``.

    Examples:
        >>> from elastic_ray.sync import DiLoCo
        >>> DiLoCo(period=32)
        DiLoCo(period=32, outer_lr=0.7, outer_momentum=0.9, give_back=True)
    """

    period: int = 16
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    give_back: bool = True

    def __post_init__(self) -> None:
        _ = self._average  # refuses what is out of range

    @property
    def _average(self) -> Average:
        return Average(
            algorithm="diloco",
            period=self.period,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            give_back=self.give_back,
        )

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return Strategy(average=self._average, name="diloco")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SMA:
    """Strategy that pulls every rank to the mean model (KungFu: SynchronousAveragingOptimizer, after EA-SGD).

    Attributes:
        alpha: share of the way.
        period: steps between two pulls.
        give_back: as of ``Average``.

    Examples:
        >>> from elastic_ray.sync import SMA
        >>> SMA(alpha=0.2)
        SMA(alpha=0.2, period=1, give_back=True)
    """

    alpha: float = 0.1
    period: int = 1
    give_back: bool = True

    def __post_init__(self) -> None:
        _ = self._average  # refuses what is out of range

    @property
    def _average(self) -> Average:
        return Average(algorithm="sma", alpha=self.alpha, period=self.period, give_back=self.give_back)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return Strategy(average=self._average, name="sma")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairAveraging:
    """Strategy that averages two ranks' models in each step (KungFu: PairAveragingOptimizer, after AD-PSGD).

    KungFu pulls from a random peer at any time; here the pairs follow a schedule, and both take the mean, so that the
    mean over all ranks stays what it is.

    Attributes:
        period: steps between two.
        give_back: as of ``Average``.

    Examples:
        >>> from elastic_ray.sync import PairAveraging
        >>> PairAveraging()
        PairAveraging(period=1, give_back=True)
    """

    period: int = 1
    give_back: bool = True

    def __post_init__(self) -> None:
        _ = self._average  # refuses what is out of range

    @property
    def _average(self) -> Average:
        return Average(algorithm="pair", period=self.period, give_back=self.give_back)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return Strategy(average=self._average, name="pair")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSGD:
    """SMA at first, all-reduce from some step on (KungFu: AdaptiveSGDOptimizer).

    Attributes:
        change_step: optimizer steps with SMA.
        alpha: as of ``SMA``.

    Examples:
        >>> from elastic_ray.sync import AdaptiveSGD
        >>> AdaptiveSGD(change_step=1000)
        AdaptiveSGD(change_step=1000, alpha=0.1)
    """

    change_step: int
    alpha: float = 0.1

    def __post_init__(self) -> None:
        _ = self._average  # refuses what is out of range

    @property
    def _average(self) -> Average:
        return Average(algorithm="sma", alpha=self.alpha, period=1, until=self.change_step)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Build the strategy; see ``StrategyBuilder``."""
        return Strategy(average=self._average, name="adaptive_sgd")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Race of what may be fastest, over real steps of the training; the winner stays.

    Attributes:
        exact: only strategies whose step is that of plain data-parallel training.
        steps: that are spent at most. They train the model as all others; a job of a kind that is known spends none.

    Examples:
        >>> from elastic_ray.sync import Auto
        >>> Auto(steps=20).exact
        True
    """

    exact: bool = True
    steps: int = 40

    def __post_init__(self) -> None:
        check_flag("exact", self.exact)
        check_count("steps", self.steps, least=12, most=1000)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Return the strategy that training starts with: touched rows for sparse tables, all-reduce for the rest."""
        return dataclasses.replace(Parallax().build(profile, topology), name="auto")


def exactly(name: str) -> str:
    """Return the glob that matches this name alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def dense(sync: Reduce | Owner, profile: ModelProfile, name: str) -> Strategy:
    """Build a strategy with one `sync` for all parameters except those with sparse gradients, which exchange rows."""
    rules = tuple(
        Rule(pattern=exactly(name), sync=Rows()) for param in profile.params if param.sparse for name in param.names
    )
    return Strategy(rules=rules, default=sync, name=name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """Base of the builders that divide optimizer state into tiles."""

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
        """Build the strategy; see ``StrategyBuilder``."""
        return dense(self._owner, profile, self._NAME)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO1(_Tiles):
    """Gradients by all-reduce; the optimizer state in tiles that lie with some ranks each (ZeRO-1, SC 2020).

    In ZeRO each rank owns one slice. Here the state is cut into tiles, the same for every size of group, so that few of
    them move when it changes; and each tile has a second owner that makes the same updates, so that the loss of a
    worker loses nothing.

    Attributes:
        copies: owners of a tile.

    Examples:
        >>> from elastic_ray.sync import ZeRO1
        >>> ZeRO1()
        ZeRO1(copies=2)
    """

    _NAME: ClassVar[str] = "zero1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO2(_Tiles):
    """Variant of ``ZeRO1`` that sends gradients only to the owners of their tile (ZeRO-2, SC 2020).

    A rank sends each part of its gradient to one owner, which adds up and sends the sum to the second one. So ``.grad``
    has no elements: its 2-norm is known, clipping by that and AMP's ``GradScaler`` work as they are, and what needs the
    elements raises an error.

    Attributes:
        copies: owners of a tile.

    Examples:
        >>> from elastic_ray.sync import ZeRO2
        >>> ZeRO2(copies=1)
        ZeRO2(copies=1)
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
    """Variant of ``PartitionedPS`` whose number of parts is the smallest that does not divide the first dimension.

    AutoDist: UnevenPartitionedPS.

    Attributes:
        copies: owners of a part.
    """

    _NAME: ClassVar[str] = "uneven_partitioned_ps"
    _CUT: ClassVar[str] = "uneven"
