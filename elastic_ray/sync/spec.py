"""Synchronisation strategies as immutable data, without ranks or addresses, and their JSON form (pure).

Sources: AutoDist's per-variable strategies (NSDI 2021 submission, petuum/autodist), KungFu's synchronous and model
averaging optimizers (OSDI 2020), DiLoCo (arXiv 2311.08105), PowerSGD (NeurIPS 2019).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from elastic_ray.sync.checks import (
    StrategyError,
    check_count,
    check_flag,
    check_one_of,
    check_range,
    check_type,
    parse_json,
)

VERSION = 1

# Far above what is of use: a strategy may come from a file of somebody else's.
_MOST_RULES, _LONGEST_NAME = 10_000, 200
_MOST_BYTES, _MOST_PARTS, _MOST_RANK, _MOST_COPIES = 1 << 40, 64, 4096, 8

WIRES = ("native", "bf16", "fp16", "int8")
UPDATES = ("auto", "sparse", "dense")
TOPOLOGIES = ("native", "two_level", "ring", "tree", "star")
CUTS = ("equal", "divisor", "uneven")
AVERAGES = ("local_sgd", "diloco", "sma", "pair")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Format used to send gradients.

    Attributes:
        dtype: ``"native"`` sends gradients unchanged, ``"bf16"`` and ``"fp16"`` round them, and ``"int8"`` quantises
            them with one scale per 2048 elements.
        rank: Rank of the low-rank approximation of gradient matrices (PowerSGD); 0 disables it. A rank above 0 requires
            ``dtype="native"``.

    Raises:
        StrategyError: a field is out of range.
    """

    dtype: str = "native"
    rank: int = 0

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, WIRES)
        check_count("rank", self.rank, least=0, most=_MOST_RANK)
        if self.rank and self.dtype != "native":
            raise StrategyError(f"Wire.rank={self.rank} needs dtype='native', but dtype is {self.dtype!r}")

    @property
    def name(self) -> str:
        """Strategy name derived from this format, such as ``"bf16"``; empty if gradients are sent unchanged."""
        return f"powersgd of rank {self.rank}" if self.rank else self.dtype if self.dtype != "native" else ""

    @property
    def exact(self) -> bool:
        """True if gradients are sent unchanged."""
        return self.dtype == "native" and not self.rank

    @property
    def compresses(self) -> bool:
        """True if gradients are sent with less precision than 16-bit rounding, i.e. as int8 or low-rank factors.

        Each rank then adds its compression error to its next gradients.
        """
        return self.rank > 0 or self.dtype == "int8"

    @property
    def gives_statistics(self) -> bool:
        """True if the mean gradient's norm is accurate to within 1e-3."""
        return not self.compresses


NATIVE = Wire()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """All-reduce of gradients in flat buckets.

    Attributes:
        bucket_bytes: Size a bucket reaches before a new one starts [bytes]. None chooses it: at most 25 MiB, less for a
            small model (see "Buckets" in docs/synchronisation.md).
        parts: Number of concurrent collectives per bucket. Use more than 1 if a single stream does not saturate the
            link.
        axis: Axis along which tensors are divided into parts; -1 picks a random axis for each tensor, based on ``seed``
            and the tensor's position.
        seed: Seed for ``axis=-1``.
        wire: Format used to send gradients.
        topology: Algorithm of the all-reduce. ``"native"`` leaves the choice to the backend. ``"two_level"`` sums
            within each node, then between nodes, and then copies the result within each node; it falls back to native
            if no two ranks share a node, or if all do. ``"ring"``, ``"tree"`` and ``"star"`` are also supported. With
            every topology, all ranks get bit-identical results.
    """

    kind: ClassVar[str] = "reduce"
    bucket_bytes: int | None = None
    parts: int = 1
    axis: int = 0
    seed: int = 0
    wire: Wire = NATIVE
    topology: str = "native"

    def __post_init__(self) -> None:
        check_one_of("topology", self.topology, TOPOLOGIES)
        if self.bucket_bytes is not None:
            check_count("bucket_bytes", self.bucket_bytes, least=1024, most=_MOST_BYTES)
        check_count("parts", self.parts, least=1, most=_MOST_PARTS)
        check_count("axis", self.axis, least=-1, most=16)
        check_count("seed", self.seed, least=0, most=1 << 31)
        check_type("wire", self.wire, Wire)
        if self.parts > 1 and self.wire.compresses:
            raise StrategyError(
                f"Reduce.parts must be 1 where the wire compresses, but got {self.parts}: use one part, or a wire of "
                "native, bf16 or fp16"
            )
        if self.topology != "native" and (self.parts > 1 or not self.wire.exact):
            raise StrategyError(
                f"Reduce.topology must be 'native' where parts is above 1 or the wire rounds, but got "
                f"{self.topology!r} with parts={self.parts} and {self.wire}: use one part and the native wire"
            )


ALL_REDUCE = Reduce()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Synchronisation through owners: one rank per tensor collects the gradient and sends the mean back.

    An owner acts like a parameter server, but every rank keeps the complete optimizer state, so losing an owner loses
    no state. With ``unit="tile"``, parameters are divided into tiles, and only ``copies`` ranks hold the optimizer
    state of a tile. These ranks make identical updates and send the new parameters to all ranks (ZeRO-1). In a group
    with no more than ``copies`` ranks, the optimizer state is not divided.

    Attributes:
        unit: ``"tensor"`` or ``"tile"``.
        gradients: For tiles only. ``"full"`` gradients are all-reduced, so that user code can read them; ``"sliced"``
            gradients are sent only to their tile's owners (ZeRO-2).
        copies: Number of owners per tile. They are on different nodes if the load can be balanced that way.
        cut: For tiles only. ``"equal"`` divides all tensors together into equal parts; ``"divisor"`` and ``"uneven"``
            divide each tensor as AutoDist does. Tensors are not cut if the optimizer is not element-wise.
        placement: For ``unit="tensor"`` only. ``"balanced"`` balances the owned bytes over the ranks; with ``"first"``,
            rank 0 owns all tensors.
        bucket_bytes: Size a bucket reaches before a new one starts [bytes]; each bucket has a single owner. None
            chooses it.
        wire: Format used to send gradients: native, bf16 or fp16.
    """

    kind: ClassVar[str] = "owner"
    placement: str = "balanced"
    bucket_bytes: int | None = None
    wire: Wire = NATIVE
    unit: str = "tensor"
    gradients: str = "full"
    copies: int = 2
    cut: str = "equal"

    def __post_init__(self) -> None:
        check_one_of("placement", self.placement, ("balanced", "first"))
        check_one_of("unit", self.unit, ("tensor", "tile"))
        check_one_of("gradients", self.gradients, ("full", "sliced"))
        check_one_of("cut", self.cut, CUTS)
        check_count("copies", self.copies, least=1, most=_MOST_COPIES)
        if self.bucket_bytes is not None:
            check_count("bucket_bytes", self.bucket_bytes, least=1024, most=_MOST_BYTES)
        check_type("wire", self.wire, Wire)
        if self.wire.rank or self.wire.dtype == "int8":
            raise StrategyError("Owner.wire must be native, bf16 or fp16: owned tensors keep no residuals")
        if self.owns_tiles and self.placement != "balanced":
            raise StrategyError(f"Owner.placement must be 'balanced' for tiles, but got {self.placement!r}")
        if self.slices_gradients and not self.owns_tiles:
            raise StrategyError("Owner.gradients='sliced' needs unit='tile', but unit is 'tensor'")

    @property
    def owns_tiles(self) -> bool:
        """True if optimizer state is divided among the ranks."""
        return self.unit == "tile"

    @property
    def slices_gradients(self) -> bool:
        """True if gradients are sent only to their tile's owners."""
        return self.gradients == "sliced"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Exchange of just the embedding table rows used in the step.

    Attributes:
        update: Layout of ``.grad`` afterwards: ``"sparse"``, ``"dense"``, or ``"auto"`` for the layout that autograd
            produces.
    """

    kind: ClassVar[str] = "rows"
    update: str = "auto"

    def __post_init__(self) -> None:
        check_one_of("update", self.update, UPDATES)


Sync: TypeAlias = Reduce | Owner | Rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Averaging of models: each rank updates its own replica, and replicas are averaged periodically.

    Between two averages, the ranks hold different models. All ranks adopt the consensus (the mean of all models) when
    the group changes, at checkpoints, after each pass over a loader, and when the run ends.

    Attributes:
        algorithm: ``"local_sgd"`` sets all ranks to the mean every ``period`` steps. ``"diloco"`` makes an outer
            Nesterov step towards the mean instead. ``"sma"`` (KungFu's synchronous model averaging) moves each rank
            towards the mean by ``alpha``. ``"pair"`` averages with another, random rank's newest model before each
            update, if that model has arrived.
        period: Number of steps between averages. Ranks make these steps independently and commit them together.
        alpha: Fraction of the distance to the mean [0 to 1], for ``"sma"``.
        outer_lr: Outer learning rate, for ``"diloco"``.
        outer_momentum: Outer momentum [0 to 1), for ``"diloco"``.
        until: Number of optimizer steps before switching to all-reduced gradients (KungFu's AdaptiveSGD); None for
            never.
        give_back: Whether a slow rank hands some of its steps in a period to ranks that would otherwise wait for it.
            The assignment of steps to ranks then depends on their speeds. False, the default, assigns the same steps in
            every run.
    """

    algorithm: str = "local_sgd"
    period: int = 4
    alpha: float = 0.1
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    until: int | None = None
    give_back: bool = False

    def __post_init__(self) -> None:
        check_one_of("algorithm", self.algorithm, AVERAGES)
        check_count("period", self.period, least=1, most=1 << 31)
        check_range("alpha", self.alpha, above=0.0, up_to=1.0)
        check_range("outer_lr", self.outer_lr, above=0.0, up_to=10.0)
        check_range("outer_momentum", self.outer_momentum, above=-1e-9, up_to=0.9999)
        check_flag("give_back", self.give_back)
        if self.until is not None:
            check_count("until", self.until, least=1, most=1 << 53)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Synchronisation of all parameters with names that match a pattern.

    Attributes:
        pattern: Glob, as in ``fnmatch``, for names from ``module.named_parameters()``.
        sync: Synchronisation of the matching parameters.
    """

    pattern: str
    sync: Sync

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise StrategyError(f"Rule.pattern must be a glob over parameter names, but got {self.pattern!r}")
        check_type("sync", self.sync, (Reduce, Owner, Rows))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Description of how the replicas of one model are kept in sync, with a rule for each parameter.

    The first rule that matches a parameter's name applies.

    Attributes:
        rules: Rules in order of precedence.
        default: Synchronisation of parameters that do not match any rule.
        average: Averaging of models instead of gradients, mutually exclusive with ``rules`` and ``default``; None to
            reduce gradients.
        name: Display name.

    Raises:
        StrategyError: a field is out of range.

    Examples:
        >>> from elastic_ray.sync import Strategy
        >>> Strategy().default.wire.dtype
        'native'
    """

    rules: tuple[Rule, ...] = ()
    default: Sync = ALL_REDUCE
    average: Average | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise StrategyError(f"Strategy.rules must be a tuple of Rules, but got {self.rules!r}")
        if len(self.rules) > _MOST_RULES:
            raise StrategyError(f"Strategy.rules must be at most {_MOST_RULES}, but are {len(self.rules)}")
        if not isinstance(self.name, str) or len(self.name) > _LONGEST_NAME or not (self.name + "x").isprintable():
            raise StrategyError(
                f"Strategy.name must be printable, {_LONGEST_NAME} characters at most: {self.name!r:.99}"
            )
        check_type("default", self.default, (Reduce, Owner, Rows))
        if self.average is not None:
            check_type("average", self.average, Average)
            if self.rules or self.default != ALL_REDUCE:
                raise StrategyError(
                    "Strategy.average excludes rules and a default: a strategy averages either models or gradients"
                )

    def with_topology(self, topology: str) -> Strategy:
        """Return a copy of the strategy that uses another topology for all all-reduced gradients.

        Raises StrategyError if the strategy does not all-reduce any gradients, or sends them in a format not supported
        by the topology.
        """
        if self.average is not None or not any(isinstance(sync, Reduce) for sync in self.syncs):
            raise StrategyError(
                f"topology {topology!r} is of gradients that are all-reduced, but {self.label} has none"
            )
        base = self.name.partition(" by ")[0]
        name = "all_reduce" if base in TOPOLOGIES else base
        if topology != "native":
            name = topology if name in ("", "all_reduce") else f"{name} by {topology}"
        rules = (dataclasses.replace(rule, sync=_by(rule.sync, topology)) for rule in self.rules)
        return dataclasses.replace(self, rules=tuple(rules), default=_by(self.default, topology), name=name)

    def asks_for(self, topology: str) -> bool:
        """True if the strategy all-reduces any gradients with the topology called ``topology``."""
        return any(isinstance(sync, Reduce) and sync.topology == topology for sync in self.syncs)

    @property
    def label(self) -> str:
        """Display name of the strategy; ``"by hand"`` if the user gave it no name."""
        return self.name or "by hand"

    @property
    def exact(self) -> bool:
        """True if each step has the same result as a step in plain data-parallel training."""
        return self.average is None and all(_wire(sync).exact for sync in self.syncs)

    @property
    def keeps_residuals(self) -> bool:
        """True if ranks carry compression errors over from one step to the next."""
        return any(_wire(sync).compresses for sync in self.syncs)

    @property
    def syncs(self) -> tuple[Sync, ...]:
        """Synchronisation method for each rule, followed by the default method."""
        return (*(rule.sync for rule in self.rules), self.default)

    @property
    def invariant(self) -> str:
        """Sentence that describes how the replicas are related after each step."""
        if self.average is None:
            kept = "; the sum over ranks of what compression left out is kept" if self.keeps_residuals else ""
            copies = {each.copies for each in self.syncs if isinstance(each, Owner) and each.owns_tiles}
            tiled = f"; each tile of the optimizer state is the same on {copies.pop()} of them" if copies else ""
            return f"parameters are bit-identical on all ranks{kept}{tiled}"
        if self.average.algorithm == "pair":
            return "each rank is pulled to the newest models of others; ranks differ until the end of a pass"
        return f"every {self.average.period} steps ranks are pulled to their mean; between they differ"

    def to_json(self) -> str:
        """Return the strategy as JSON text for :meth:`from_json`."""
        return json.dumps(
            {
                "version": VERSION,
                "name": self.name,
                "rules": [{"pattern": rule.pattern, **_to_dict(rule.sync)} for rule in self.rules],
                "default": _to_dict(self.default),
                "average": None if self.average is None else dataclasses.asdict(self.average),
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """Return the strategy described by the JSON text from :meth:`to_json`.

        Raises:
            StrategyError: the text is not JSON or has a different version, or a field is unknown or out of range.
        """
        tree = parse_json(text)
        if not isinstance(tree, dict) or type(tree.get("version")) is not int or tree["version"] != VERSION:
            found = repr(tree.get("version")) if isinstance(tree, dict) else f"a {type(tree).__name__}"
            raise StrategyError(f"a strategy's JSON must be an object of version {VERSION}, but got {found}")
        _known("the strategy", tree, {"version", "name", "rules", "default", "average"})
        rules, average = tree.get("rules", []), tree.get("average")
        if not isinstance(rules, list) or not all(isinstance(each, dict) for each in rules):
            raise StrategyError(f"rules must be a list of objects, but got {rules!r}")
        return cls(
            rules=tuple(
                Rule(pattern=each.get("pattern", ""), sync=_sync({k: v for k, v in each.items() if k != "pattern"}))
                for each in rules
            ),
            default=_sync(tree["default"]) if "default" in tree else ALL_REDUCE,
            average=None if average is None else _build(Average, average),
            name=tree.get("name", ""),
        )


_KINDS: Mapping[str, type[Sync]] = {kind.kind: kind for kind in (Reduce, Owner, Rows)}


def _wire(sync: Sync) -> Wire:
    return NATIVE if isinstance(sync, Rows) else sync.wire


def _to_dict(sync: Sync) -> dict[str, Any]:
    return {"kind": sync.kind, **dataclasses.asdict(sync)}


def _by(sync: Sync, topology: str) -> Sync:
    return dataclasses.replace(sync, topology=topology) if isinstance(sync, Reduce) else sync


def _sync(tree: Any) -> Sync:
    """Return a synchronisation method built from its JSON tree."""
    if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str) or tree["kind"] not in _KINDS:
        raise StrategyError(f"kind must be one of {', '.join(_KINDS)}, but got {tree!r}")
    fields = {key: value for key, value in tree.items() if key != "kind"}
    if "wire" in fields:
        fields["wire"] = _build(Wire, fields["wire"])
    built: Sync = _build(_KINDS[tree["kind"]], fields)
    return built


def _build(kind: type[Any], fields: Any) -> Any:
    if not isinstance(fields, dict):
        raise StrategyError(f"{kind.__name__} must be a JSON object, but got {fields!r}")
    _known(kind.__name__, fields, {field.name for field in dataclasses.fields(kind)})
    return kind(**fields)


def _known(what: str, fields: Mapping[str, Any], known: set[str]) -> None:
    if strangers := sorted(set(fields) - known):
        raise StrategyError(f"{what} has no field {', '.join(strangers)}; it has {', '.join(sorted(known))}")
