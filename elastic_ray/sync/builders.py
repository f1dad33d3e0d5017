"""Builders that create a ``Strategy`` for a model and a group, named as in AutoDist and KungFu (pure).

Each builder's docstring gives its original name and the differences from the original.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from elastic_ray.sync.checks import StrategyError, check_count, check_flag
from elastic_ray.sync.plan import ModelProfile, Topology
from elastic_ray.sync.spec import NATIVE, Average, Owner, Reduce, Rows, Rule, Strategy, Wire
from placement.checks import check_whole


class StrategyBuilder(Protocol):
    """Interface for strategy builders, which create a strategy for a model and a group.

    A custom builder can be passed wherever a strategy is accepted.

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
        """Return the strategy for a model and a group; it must depend only on the arguments, which all ranks share."""


class _Dense:
    """Base class of strategies that synchronise all dense gradients in the same way."""

    __slots__ = ()
    _NAME: ClassVar[str]

    def __post_init__(self) -> None:
        _ = self._sync  # refuses what is out of range

    @property
    def _sync(self) -> Reduce | Owner:
        raise NotImplementedError

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Return the strategy for a model and a group, according to the builder's settings."""
        return dense(self._sync, profile, self._NAME)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(_Dense):
    """Strategy that all-reduces every gradient in flat buckets, like torch DDP (AutoDist: AllReduce).

    Attributes:
        bucket_bytes: Size a bucket reaches before a new one starts [bytes]; None chooses it, see ``Reduce``. AutoDist's
            ``chunk_size`` counts variables instead.
        wire: Format used to send gradients.
        topology: Algorithm of the all-reduce: ``"native"``, ``"two_level"``, ``"ring"``, ``"tree"`` or ``"star"``
            (KungFu's strategies).

    Examples:
        >>> from elastic_ray.sync import AllReduce
        >>> AllReduce(bucket_bytes=1 << 20).bucket_bytes
        1048576
    """

    bucket_bytes: int | None = None
    wire: Wire = NATIVE
    topology: str = "native"

    @property
    def _sync(self) -> Reduce:
        return Reduce(bucket_bytes=self.bucket_bytes, wire=self.wire, topology=self.topology)

    @property
    def _NAME(self) -> str:  # type: ignore[override]
        return self.wire.name or ("all_reduce" if self.topology == "native" else self.topology)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(_Dense):
    """Low-rank compression of gradient matrices, with error feedback (Vogels et al., NeurIPS 2019).

    Attributes:
        rank: Rank of the approximation; a higher rank is more accurate, but more data is sent.

    Examples:
        >>> from elastic_ray.sync import PowerSGD
        >>> PowerSGD(rank=2)
        PowerSGD(rank=2)
    """

    rank: int = 4
    _NAME: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, least=1, error=StrategyError)

    @property
    def _sync(self) -> Reduce:
        return Reduce(wire=Wire(rank=self.rank))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PS(_Dense):
    """Strategy that sums all gradients on rank 0, which acts like a single parameter server (AutoDist: PS).

    Rank 0 sends the mean back, and every rank applies the update itself. In AutoDist, the server holds and updates the
    parameters, possibly asynchronously.
    """

    _NAME: ClassVar[str] = "ps"

    @property
    def _sync(self) -> Owner:
        return Owner(placement="first")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PSLoadBalancing(_Dense):
    """Variant of ``PS`` where each rank owns some of the tensors, balanced by bytes (AutoDist: PSLoadBalancing)."""

    _NAME: ClassVar[str] = "ps_balanced"

    @property
    def _sync(self) -> Owner:
        return Owner(placement="balanced")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedAR(_Dense):
    """Several concurrent all-reduces per bucket, for links that a single stream cannot fill (AutoDist: PartitionedAR).

    Attributes:
        parts: Number of all-reduces per bucket. AutoDist uses the smallest divisor of the first dimension instead, so
            a prime dimension is split into parts of size 1.
    """

    parts: int = 4
    _NAME: ClassVar[str] = "partitioned_ar"

    @property
    def _sync(self) -> Reduce:
        return Reduce(parts=self.parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomAxisPartitionAR(_Dense):
    """Variant of ``PartitionedAR`` that divides each tensor along a random axis (AutoDist: RandomAxisPartitionAR).

    Attributes:
        parts: Number of all-reduces per bucket.
        seed: Seed for choosing axes, which makes runs repeatable; AutoDist chooses new axes in each run.
    """

    parts: int = 4
    seed: int = 0
    _NAME: ClassVar[str] = "random_axis_partition_ar"

    @property
    def _sync(self) -> Reduce:
        return Reduce(parts=self.parts, axis=-1, seed=self.seed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallax:
    """Strategy that exchanges only used embedding-table rows and all-reduces the rest (Parallax, EuroSys 2019).

    Attributes:
        update: Layout of a table's ``.grad`` after the exchange: ``"sparse"``, ``"dense"``, or ``"auto"`` for the
            layout that autograd produces.
        wire: Format used to send all other gradients.

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
        """Return a strategy that exchanges only used embedding-table rows, and all-reduces all other gradients."""
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


class _Averaging:
    """Base class of strategies that average models; its fields have the same names and limits as in ``Average``."""

    __slots__ = ()
    algorithm: ClassVar[str]

    def __post_init__(self) -> None:
        _ = self._average  # refuses what is out of range

    @property
    def _average(self) -> Average:
        fields: Any = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # type: ignore[arg-type]
        return Average(algorithm=self.algorithm, **fields)

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Return the strategy for a model and a group."""
        return Strategy(average=self._average, name=self.algorithm)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD(_Averaging):
    """Strategy that averages models every few steps (Stich, ICLR 2019).

    Attributes:
        period: Number of steps between averages.
        give_back: Whether slow ranks hand some of their steps to other ranks; see ``Average``.

    Examples:
        >>> from elastic_ray.sync import LocalSGD
        >>> LocalSGD(period=8)
        LocalSGD(period=8, give_back=False)
    """

    period: int = 4
    give_back: bool = False

    algorithm: ClassVar[str] = "local_sgd"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo(_Averaging):
    """Strategy that follows local steps with an outer Nesterov step to the mean (Douillard et al., arXiv 2311.08105).

    Attributes:
        period: Number of local steps between outer steps.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step.
        give_back: Whether slow ranks hand some of their steps to other ranks; see ``Average``.

    Examples:
        >>> from elastic_ray.sync import DiLoCo
        >>> DiLoCo(period=32)
        DiLoCo(period=32, outer_lr=0.7, outer_momentum=0.9, give_back=False)
    """

    period: int = 16
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    give_back: bool = False

    algorithm: ClassVar[str] = "diloco"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SMA(_Averaging):
    """Strategy that pulls every rank towards the mean model (KungFu: SynchronousAveragingOptimizer, after EA-SGD).

    Attributes:
        alpha: Fraction of the distance to the mean that each pull moves a rank's model.
        period: Number of steps between pulls.
        give_back: Whether slow ranks hand some of their steps to other ranks; see ``Average``.

    Examples:
        >>> from elastic_ray.sync import SMA
        >>> SMA(alpha=0.2)
        SMA(alpha=0.2, period=1, give_back=False)
    """

    alpha: float = 0.1
    period: int = 1
    give_back: bool = False

    algorithm: ClassVar[str] = "sma"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairAveraging(_Averaging):
    """Strategy that averages each model with another, random rank's newest model (KungFu: PairAveragingOptimizer).

    During a step, each rank pulls another, random rank's newest model; before its next update, it averages its own
    model with the pulled one. No rank waits for a model, so runs are not reproducible.

    Attributes:
        period: Number of steps each rank takes on its own before all ranks commit them together.
        give_back: Whether slow ranks hand some of their steps to other ranks; see ``Average``.

    Examples:
        >>> from elastic_ray.sync import PairAveraging
        >>> PairAveraging()
        PairAveraging(period=8, give_back=False)
    """

    period: int = 8
    give_back: bool = False

    algorithm: ClassVar[str] = "pair"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSGD(_Averaging):
    """Strategy that starts with SMA and switches to all-reduce at a given step (KungFu: AdaptiveSGDOptimizer).

    Attributes:
        change_step: Number of optimizer steps before the switch.
        alpha: Fraction of the distance to the mean that each pull moves a rank's model, as in ``SMA``.

    Examples:
        >>> from elastic_ray.sync import AdaptiveSGD
        >>> AdaptiveSGD(change_step=1000)
        AdaptiveSGD(change_step=1000, alpha=0.1)
    """

    change_step: int
    alpha: float = 0.1
    algorithm: ClassVar[str] = "adaptive_sgd"

    @property
    def _average(self) -> Average:
        return Average(algorithm="sma", alpha=self.alpha, period=1, until=self.change_step)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Strategy chosen by a race between candidates during real training steps.

    Attributes:
        exact: Whether to consider only strategies that produce the same result as plain data-parallel training.
        steps: Maximum number of steps in the race. These steps train the model like any other steps. There is no race
            if earlier jobs have already found the fastest strategy.

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
        """Return the pre-race strategy: exchange of used rows for embedding tables, all-reduce for the rest."""
        return dataclasses.replace(Parallax().build(profile, topology), name="auto")


def exactly(name: str) -> str:
    """Return a glob pattern that matches only ``name``, with special characters escaped."""
    return re.sub(r"([*?[])", r"[\1]", name)


def dense(sync: Reduce | Owner, profile: ModelProfile, name: str) -> Strategy:
    """Return a strategy called `name` that applies `sync` to dense gradients and exchanges sparse gradients as rows."""
    rules = tuple(
        Rule(pattern=exactly(name), sync=Rows()) for param in profile.params if param.sparse for name in param.names
    )
    return Strategy(rules=rules, default=sync, name=name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles(_Dense):
    """Base class of builders that divide optimizer state into tiles."""

    copies: int = 2
    _GRADIENTS: ClassVar[str] = "full"
    _CUT: ClassVar[str] = "equal"

    @property
    def _sync(self) -> Owner:
        return Owner(unit="tile", gradients=self._GRADIENTS, copies=self.copies, cut=self._CUT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO1(_Tiles):
    """Strategy that all-reduces gradients and divides the optimizer state among the ranks (ZeRO-1, SC 2020).

    In the original ZeRO, each rank owns one slice. Here the state is divided into tiles that do not depend on the group
    size, so that few tiles move when the size changes. By default, each tile has a second owner that makes the same
    updates, so that losing a worker loses no state.

    Attributes:
        copies: Number of owners per tile.

    Examples:
        >>> from elastic_ray.sync import ZeRO1
        >>> ZeRO1()
        ZeRO1(copies=2)
    """

    _NAME: ClassVar[str] = "zero1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZeRO2(_Tiles):
    """Variant of ``ZeRO1`` that sends each gradient only to its tile's owners (ZeRO-2, SC 2020).

    Each rank sends each part of its gradient to one owner, which sums the parts and sends the sum to the other owners.
    Because no rank has the whole gradient, ``.grad`` has no readable elements. Its 2-norm is known, so clipping by that
    norm and AMP's ``GradScaler`` work as usual; operations that need the elements raise an error.

    Attributes:
        copies: Number of owners per tile.

    Examples:
        >>> from elastic_ray.sync import ZeRO2
        >>> ZeRO2(copies=1)
        ZeRO2(copies=1)
    """

    _NAME: ClassVar[str] = "zero2"
    _GRADIENTS: ClassVar[str] = "sliced"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedPS(_Tiles):
    """Strategy that divides tensors into parts, each updated by its owners (AutoDist: PartitionedPS).

    Each tensor is divided along its first dimension; the number of parts is that dimension's smallest divisor above 1,
    but at most 64. Updates are synchronous. In AutoDist, each part is on a single server, which receives its gradients.
    Here each part has ``copies`` owners among the ranks, and gradients are all-reduced, so that user code can clip
    them.

    Attributes:
        copies: Number of owners per part.
    """

    _NAME: ClassVar[str] = "partitioned_ps"
    _CUT: ClassVar[str] = "divisor"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPartitionedPS(_Tiles):
    """Variant of ``PartitionedPS`` with the smallest number of parts that does not divide the first dimension.

    The original is AutoDist's UnevenPartitionedPS.

    Attributes:
        copies: Number of owners per part.
    """

    _NAME: ClassVar[str] = "uneven_partitioned_ps"
    _CUT: ClassVar[str] = "uneven"


NAMED: Mapping[str, Callable[[], StrategyBuilder]] = {
    "all_reduce": AllReduce,
    "two_level": lambda: AllReduce(topology="two_level"),
    "ring": lambda: AllReduce(topology="ring"),
    "tree": lambda: AllReduce(topology="tree"),
    "star": lambda: AllReduce(topology="star"),
    "ps": PS,
    "ps_balanced": PSLoadBalancing,
    "zero1": ZeRO1,
    "zero2": ZeRO2,
    "partitioned_ps": PartitionedPS,
    "uneven_partitioned_ps": UnevenPartitionedPS,
    "partitioned_ar": PartitionedAR,
    "random_axis_partition_ar": RandomAxisPartitionAR,
    "parallax": Parallax,
    "bf16": lambda: AllReduce(wire=Wire(dtype="bf16")),
    "fp16": lambda: AllReduce(wire=Wire(dtype="fp16")),
    "int8": lambda: AllReduce(wire=Wire(dtype="int8")),
    "powersgd": PowerSGD,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "sma": SMA,
    "pair": PairAveraging,
    "auto": Auto,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Builder that returns a given strategy, or applies one synchronisation method to all dense parameters."""

    given: Strategy | Reduce | Owner

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Return the strategy, regardless of the group."""
        return self.given if isinstance(self.given, Strategy) else dense(self.given, profile, "")


def resolve_strategy(given: object) -> StrategyBuilder:
    """Return the strategy builder for a user's ``strategy=`` argument.

    Args:
        given: A name in :data:`NAMED`, a builder, a ``Strategy``, a ``Reduce`` or ``Owner`` for all parameters, or the
            path to a JSON file that contains a strategy.

    Raises:
        StrategyError: the name is unknown, or the file does not exist or does not contain a valid strategy.
        TypeError: `given` is none of these.
    """
    if isinstance(given, (Strategy, Reduce, Owner)):
        return _Given(given)
    if isinstance(given, os.PathLike) or (isinstance(given, str) and (given.endswith(".json") or os.sep in given)):
        return _Given(_read(Path(given)))
    if isinstance(given, str):
        if given not in NAMED:
            raise StrategyError(
                f"strategy must be one of {', '.join(NAMED)}, a builder of elastic_ray.sync, a Strategy, or the path "
                f"of its JSON, but got {given!r}"
            )
        return NAMED[given]()
    if isinstance(given, type) or not callable(getattr(given, "build", None)):
        hint = "; make one of it: call it" if isinstance(given, type) else ""
        hint = hint or ("; Strategy.from_json(json.dumps(...)) reads one" if isinstance(given, dict) else "")
        raise TypeError(f"strategy must be a name, a builder, a Strategy or a path, but got {given!r}{hint}")
    return given  # type: ignore[return-value]


def _read(path: Path) -> Strategy:
    """Return the strategy stored in a file; error messages name the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise StrategyError(f"strategy {str(path)!r} cannot be read: {error}") from None
    try:
        return Strategy.from_json(text)
    except StrategyError as error:
        raise StrategyError(f"strategy {str(path)!r}: {error}") from None
