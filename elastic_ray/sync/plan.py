"""Plan of a strategy for a model and a group: its buckets, and how each bucket is synchronised (pure)."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence

from elastic_ray.state.layout import digest
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.spec import Owner, Reduce, Rows, Strategy, Sync


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """Properties of one trainable parameter.

    Attributes:
        names: Names in the model; a tied parameter has several.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor, such as ``"float32"``.
        itemsize: Size of an element [bytes].
        device: Type of the device, such as ``"cpu"``, without the index, which may differ between ranks.
        group: Index of the parameter's group in the optimizer.
        sparse: Whether a layer with ``sparse=True`` computes its gradients.
        table: Whether the parameter is used only by embedding layers, according to the module tree.
        rows: Median number of distinct rows used by a rank in a step; None if unknown or if ``table`` is False.
        divisible: Whether the elements are contiguous in memory, so that any range of them is a tensor.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"
    itemsize: int = 4
    device: str = "cpu"
    group: int = 0
    sparse: bool = False
    table: bool = False
    rows: int | None = None
    divisible: bool = True

    @property
    def name(self) -> str:
        """First of the parameter's names in the model."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Number of elements in the parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor [bytes]."""
        return self.numel * self.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerInfo:
    """Properties of an optimizer that strategies depend on.

    Attributes:
        name: Name of the optimizer's class.
        takes_sparse: Whether it accepts sparse gradients, with the same result as for dense ones.
        only_sparse: Whether it accepts only sparse gradients (SparseAdam).
        elementwise: Whether it updates each element independently of the rest of its tensor.
    """

    name: str = "SGD"
    takes_sparse: bool = True
    only_sparse: bool = False
    elementwise: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Properties of a model's parameters and optimizers that strategies depend on.

    Attributes:
        params: Trainable parameters, ordered by parameter group, and in model order within a group.
        optimizer: Optimizer of the parameters; the first one if the model has several.
        by_group: Optimizer of each parameter group; empty if the model has only one optimizer.
        frozen: Names of parameters that are not currently being trained.
    """

    params: tuple[ParamInfo, ...]
    optimizer: OptimizerInfo = OptimizerInfo()
    by_group: tuple[OptimizerInfo, ...] = ()
    frozen: tuple[str, ...] = ()

    def optimizer_of(self, param: ParamInfo) -> OptimizerInfo:
        """Return the optimizer that updates a parameter."""
        return self.by_group[param.group] if self.by_group else self.optimizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Locations of a group's ranks: their nodes and network domains.

    Attributes:
        nodes: Name of each rank's node.
        domains: Network domain of each rank's node; empty if any node has no domain label.
    """

    nodes: tuple[str, ...] = ("node-0",)
    domains: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return len(self.nodes)

    @property
    def node_numbers(self) -> tuple[int, ...]:
        """Node number of each rank, starting at 0; nodes in the same domain have consecutive numbers."""
        return _numbers(tuple(zip(self.domains, self.nodes, strict=True)) if self.domains else self.nodes)

    @property
    def level_numbers(self) -> tuple[int, ...]:
        """Number of each rank's network domain, starting at 0, or of its node if all nodes are in one domain."""
        return _numbers(self.domains) if len(set(self.domains)) > 1 else self.node_numbers

    @property
    def why_flat(self) -> str:
        """Reason the ``"two_level"`` all-reduce cannot be used in this group; empty if it can."""
        there = len(set(self.level_numbers))
        if there == 1:
            return "all ranks are on one node"
        return "" if there < self.world_size else "no two ranks share a node or domain"


def _numbers(names: Sequence[object]) -> tuple[int, ...]:
    order = sorted(set(names), key=str)
    return tuple(order.index(name) for name in names)


# As torch DDP: a small first bucket starts the communication early, later ones amortise its latency.
FIRST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 1 << 20, 25 << 20
# What the last bucket holds cannot travel before backward is over: of a small model, at most this share.
_MOST_OF_MODEL = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Plan for one bucket: its parameters, their parameter group, and how they are synchronised."""

    params: tuple[int, ...]  # positions in ``ModelProfile.params``, in the bucket's order
    group: int
    sync: Sync  # what is done with it
    owner: int = 0  # the rank that collects it, of an ``Owner``; else 0
    # the node of each rank, as a number, where the way through the group depends on it; else empty
    nodes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Plan for parameters whose optimizer state is divided into tiles, each owned by a few ranks."""

    params: tuple[int, ...]  # positions in ``ModelProfile.params``, in its order
    owner: Owner  # how
    divided: bool  # whether the group has more ranks than each tile has owners; else every rank holds the whole state

    def holds(self, params: Sequence[int]) -> bool:
        """True if this plan covers all parameters at the given positions in ``ModelProfile.params``."""
        return set(params) <= set(self.params)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """Plan of all buckets in reduction order: last parameters first, as in a backward pass."""

    buckets: tuple[BucketPlan, ...]  # of at least one parameter each
    strategy: Strategy
    tiles: TilePlan | None = None  # of the optimizer state; None where every rank holds all of it under any group

    @property
    def digest(self) -> int:
        """40-bit digest of the plan, compared between all ranks before the first step."""
        buckets = [(b.params, b.group, b.sync, b.owner, b.nodes) for b in self.buckets]
        return digest((buckets, self.strategy.to_json(), self.tiles.divided if self.tiles is not None else None))


def lower(strategy: Strategy, profile: ModelProfile, topology: Topology) -> SyncPlan:
    """Return the plan (buckets, operations and owners) that carries out a strategy for a model in a group.

    Raises StrategyError if a rule matches no parameter, tied parameters have different rules, or the optimizer does not
    accept the gradients produced by a rule.
    """
    assigned = _assign(strategy, profile)
    for param, sync in zip(profile.params, assigned, strict=True):
        _check(param, sync, profile)
    tiles = _tiles(assigned, topology)
    divided = tiles is not None and tiles.divided
    syncs = [_routed(_reduction(sync, divided=divided), topology) for sync in assigned]
    cuts = _cut_all(profile.params, syncs)
    cuts = [dataclasses.replace(cut, nodes=_nodes(cut.sync, topology)) for cut in cuts]
    owners = _owners([(cut.sync, sum(profile.params[i].nbytes for i in cut.params)) for cut in cuts], topology)
    return SyncPlan(
        buckets=tuple(
            dataclasses.replace(cut, owner=owner) if owner else cut for cut, owner in zip(cuts, owners, strict=True)
        ),
        strategy=strategy,
        tiles=tiles,
    )


def _reduction(sync: Sync, *, divided: bool) -> Sync:
    """Return how gradients are synchronised: all-reduce for tiles if every rank needs all gradients."""
    if isinstance(sync, Owner) and sync.owns_tiles and not (divided and sync.slices_gradients):
        return Reduce(bucket_bytes=sync.bucket_bytes, wire=sync.wire)
    return sync


def _nodes(sync: Sync, topology: Topology) -> tuple[int, ...]:
    """Return the location of each rank if the topology depends on it, otherwise an empty tuple."""
    if not isinstance(sync, Reduce) or sync.topology == "native":
        return ()
    return topology.level_numbers if sync.topology == "two_level" else topology.node_numbers


def _routed(sync: Sync, topology: Topology) -> Sync:
    """Return `sync` with the native topology in place of ``"two_level"`` if the group lacks two levels."""
    if isinstance(sync, Reduce) and sync.topology == "two_level" and topology.why_flat:
        return dataclasses.replace(sync, topology="native")
    return sync


def _tiles(syncs: Sequence[Sync], topology: Topology) -> TilePlan | None:
    """Return the tiled parameters; raise StrategyError if rules cut or copy tiles differently."""
    found = {i: sync for i, sync in enumerate(syncs) if isinstance(sync, Owner) and sync.owns_tiles}
    if not found:
        return None
    owner = next(iter(found.values()))
    for other in found.values():
        if (other.copies, other.cut) != (owner.copies, owner.cut):
            raise StrategyError(
                "all tiles of a model must have the same number of copies and the same cut, but got "
                f"copies={owner.copies}, cut={owner.cut!r} and copies={other.copies}, cut={other.cut!r}"
            )
    return TilePlan(params=tuple(found), owner=owner, divided=topology.world_size > owner.copies)


def _assign(strategy: Strategy, profile: ModelProfile) -> list[Sync]:
    """Return each parameter's `sync`: the first rule matching any of its names, otherwise the default."""
    matched: set[int] = set()
    found: list[Sync] = []
    for param in profile.params:
        ways: dict[Sync, str] = {}
        for name in param.names:
            for number, rule in enumerate(strategy.rules):
                if fnmatch.fnmatchcase(name, rule.pattern):
                    matched.add(number)
                    ways.setdefault(rule.sync, name)
                    break
        if len(ways) > 1:
            raise StrategyError(
                f"tied parameters need one strategy, but {' and '.join(ways.values())} are one tensor with "
                f"{len(ways)} rules: {' and '.join(map(str, ways))}. Give all its names the same one"
            )
        found.append(next(iter(ways), strategy.default))
    for number, rule in enumerate(strategy.rules):
        waits = any(fnmatch.fnmatchcase(name, rule.pattern) for name in profile.frozen)
        if number not in matched and not waits:
            hidden = any(fnmatch.fnmatchcase(name, rule.pattern) for param in profile.params for name in param.names)
            why = "earlier rules match all that it does" if hidden else "no trainable parameter has such a name"
            names = ", ".join(param.name for param in profile.params[:6])
            raise StrategyError(f"the rule for {rule.pattern!r} is of no effect: {why}; there are {names} and so on")
    return found


def _check(param: ParamInfo, sync: Sync, profile: ModelProfile) -> None:
    """Raise StrategyError if `sync` is not suitable for the parameter or its optimizer."""
    if isinstance(sync, Owner) and sync.owns_tiles and param.dtype.startswith("complex"):
        raise StrategyError(
            f"parameters in tiles must be real, but {param.name} is {param.dtype}: use strategy='all_reduce', or give "
            "it a rule of Reduce"
        )
    if isinstance(sync, Rows):
        if len(param.shape) != 2:
            raise StrategyError(
                f"Rows needs a table of two dimensions, but {param.name} has shape {param.shape}: exclude it from the "
                "patterns of Rows"
            )
        optimizer = profile.optimizer_of(param)
        gives_sparse = sync.update == "sparse" or (sync.update == "auto" and param.sparse)
        if gives_sparse and not optimizer.takes_sparse:
            raise StrategyError(
                f"{optimizer.name} cannot step the sparse gradient of {param.name}: use SGD or Adagrad without weight "
                "decay for this table, or Rows(update='dense')"
            )
        if not gives_sparse and optimizer.only_sparse:
            raise StrategyError(f"{optimizer.name} steps sparse gradients only, but that of {param.name} is dense")
    elif param.sparse:
        raise StrategyError(
            f"{param.name} has sparse gradients, which only Rows synchronises: use strategy='parallax' or 'auto', give "
            "it a rule of Rows, or set sparse=False"
        )


def _cut_all(params: Sequence[ParamInfo], syncs: Sequence[Sync]) -> list[BucketPlan]:
    """Return buckets in reduction order, each with a single group, dtype, device and synchronisation method.

    Tables are last, as in backward. If the last dense bucket is small, it is placed after them and carries control
    values.
    """
    dense: list[BucketPlan] = []
    tables: list[BucketPlan] = []
    for kind in dict.fromkeys(_kind(p, sync) for p, sync in zip(params, syncs, strict=True)):
        mine = [i for i in reversed(range(len(params))) if _kind(params[i], syncs[i]) == kind]
        sync = syncs[mine[0]]
        found = tables if isinstance(sync, Rows) else dense
        for cut in _cut(mine, params, sync, first=not dense):
            found.append(BucketPlan(params=tuple(cut), group=kind[0], sync=sync))
    small = tables and dense and sum(params[i].nbytes for i in dense[-1].params) <= FIRST_BUCKET_BYTES
    return [*dense[:-1], *tables, dense[-1]] if small else [*dense, *tables]


def _kind(param: ParamInfo, sync: Sync) -> tuple[int, str, str, Sync]:
    return param.group, param.dtype, param.device, sync


def _cut(mine: Sequence[int], params: Sequence[ParamInfo], sync: Sync, *, first: bool) -> list[list[int]]:
    """Return parameters of one kind, bucket by bucket, with each table alone in its bucket."""
    if isinstance(sync, Rows):
        return [[i] for i in mine]
    full = limit = sync.bucket_bytes or _bucket_bytes(sync, sum(params[i].nbytes for i in mine))
    if first and sync.bucket_bytes is None:
        limit = min(FIRST_BUCKET_BYTES, full)
    cuts: list[list[int]] = [[]]
    size = 0
    for i in mine:
        if size >= limit:  # not before: a bias would be alone if the matrix after it did not fit
            cuts.append([])
            size, limit = 0, full
        cuts[-1].append(i)
        size += params[i].nbytes
    return cuts


def _bucket_bytes(sync: Reduce | Owner, total: int) -> int:
    """Return the bucket size if the user has not set it, given ``total`` bytes of gradients."""
    full = _MOST_BUCKET_BYTES if isinstance(sync, Reduce) or sync.owns_tiles else _MOST_BUCKET_BYTES // 4
    return min(full, max(FIRST_BUCKET_BYTES, total // _MOST_OF_MODEL))


def _owners(cuts: Sequence[tuple[Sync, int]], topology: Topology) -> list[int]:
    """Return the owner of each bucket: the rank with the fewest bytes so far, as in AutoDist's PSLoadBalancing."""
    loads = [0] * topology.world_size
    owners = []
    for sync, nbytes in cuts:
        if not isinstance(sync, Owner) or sync.owns_tiles:
            owners.append(0)
            continue
        owner = 0 if sync.placement == "first" else min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[owner] += nbytes
        owners.append(owner)
    return owners
