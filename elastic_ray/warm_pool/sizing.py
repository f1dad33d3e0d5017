"""Decisions about which warm processes the cluster's pool keeps, starts and ends (pure)."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from placement.checks import check_number, check_whole

VARIABLE = "ELASTIC_RAY_POOL"
"""Environment variable of the cluster's nodes that sets a :class:`PoolConfig`; see :func:`read_config`."""

_OFF = ("off", "0")
_LIVES_S = 10.0  # a job that has not asked for so long is taken for gone
_ESTIMATE_BYTES = 512 << 20  # of a process that has not told its size yet: Ray, torch and what a first step imports


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Limits of the cluster's pool of warm processes, which apply to all jobs together."""

    per_node: int = 4  # most warm processes on one node; 0 turns the pool off
    total: int = 32  # most of them on the whole cluster
    memory_share: float = 0.1  # most of a node's memory, as Ray counts it, that they may use together
    environments: int = 4  # most runtime environments that there are warm processes for; the last ones asked for stay
    idle_s: float = 300.0  # time without any job after which all of them, and the pool itself, end [s]
    # time after a job has begun on a node, and after its first step, before a process is started there [s]
    quiet_s: float = 20.0

    def __post_init__(self) -> None:
        for name, least in (("per_node", 0), ("total", 0), ("environments", 1)):
            check_whole(f"{name} of the pool", getattr(self, name), least=least)
        for name in ("idle_s", "quiet_s"):
            check_number(f"{name} of the pool", getattr(self, name), above=0, unit="seconds", finite=True)
        check_number("memory_share of the pool", self.memory_share, above=0, most=1)

    @property
    def on(self) -> bool:
        """True if the pool is enabled."""
        return self.per_node > 0 and self.total > 0


def read_config(environment: Mapping[str, str]) -> PoolConfig:
    """Return the pool's limits as set by the environment variable ``ELASTIC_RAY_POOL`` of the cluster's nodes.

    ``ELASTIC_RAY_POOL=off`` disables the pool; ``ELASTIC_RAY_POOL=per_node=2,total=16,memory_share=0.05`` sets fields
    of :class:`PoolConfig`. Fields that are not set have their defaults.
    """
    text = environment.get(VARIABLE, "").strip()
    if text.lower() in _OFF:
        return PoolConfig(per_node=0)
    kinds = {name: type(default) for name, default in dataclasses.asdict(PoolConfig()).items()}
    values: dict[str, float | int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in kinds:
            raise ValueError(
                f"{VARIABLE} must be 'off' or set some of {', '.join(kinds)}, as in 'per_node=2,total=16', but has "
                f"{part!r}"
            )
        try:
            values[name] = kinds[name](value)
        except ValueError:
            raise ValueError(f"{VARIABLE} must give {name} a {kinds[name].__name__}, but got {value!r}") from None
    return PoolConfig(**values)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolNode:
    """Node of the cluster; its memory is None if Ray does not report it."""

    node: str
    memory_bytes: float | None = None
    draining: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PooledProcess:
    """Process in the pool that no job has claimed yet."""

    name: str  # its actor's
    node: str  # where it runs
    environment: str  # key of its runtime environment
    ready: bool  # whether it has imported everything
    memory_bytes: int = 0  # resident memory; 0 while it is not known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRequest:
    """Request for warm processes from one job."""

    job: str
    environment: str  # key of the runtime environment of its processes
    nodes: Mapping[str, int]  # how many processes it would use, by node
    since_s: float  # when it asked first [s]
    asked_s: float  # when it asked last [s]
    over: bool = False  # whether it has said that it has ended

    def lives(self, now_s: float) -> bool:
        """True if the job has not ended, and has renewed its request recently."""
        return not self.over and now_s - self.asked_s <= _LIVES_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Instruction to start a process."""

    node: str
    environment: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Instruction to end a process."""

    name: str
    reason: str


def remember(config: PoolConfig, requests: Iterable[ProcessRequest], now_s: float) -> tuple[ProcessRequest, ...]:
    """Return the requests that still count at ``now_s``, most urgent first.

    Running jobs are placed first, in a fixed order (by first request), so that the pool does not alternate between
    them. Ended jobs are placed after them, latest first, because the next job is most likely similar to the latest one.
    """
    fresh = [request for request in requests if now_s - request.asked_s <= config.idle_s]
    living = sorted((each for each in fresh if each.lives(now_s)), key=lambda each: (each.since_s, each.job))
    ended = sorted((each for each in fresh if not each.lives(now_s)), key=lambda each: (-each.asked_s, each.job))
    kept: list[ProcessRequest] = []
    environments: dict[str, None] = {}
    for request in (*living, *ended):
        environments.setdefault(request.environment)
        if list(environments).index(request.environment) < config.environments:
            kept.append(request)
    return tuple(kept)


def plan(
    config: PoolConfig,
    *,
    nodes: Sequence[PoolNode],
    processes: Sequence[PooledProcess],
    requests: Sequence[ProcessRequest],
    busy: Mapping[str, float],
    now_s: float,
) -> tuple[Start | End, ...]:
    """Return the processes to start and to end now.

    Returns:
        All ends, followed by at most one start per node. A start that needs the space of an ended process happens in
        a later call.
    """
    living = {node.node: node for node in nodes if not node.draining}
    sizes = _sizes(processes)
    wanted = _allot(config, living, sizes, remember(config, requests, now_s))
    ends = tuple(_ends(config, {node.node for node in nodes}, living, processes, wanted))
    left = [each for each in processes if each.name not in {end.name for end in ends}]
    have = collections.Counter((each.node, each.environment) for each in left)
    starting = {each.node for each in left if not each.ready}
    room = config.total - len(processes)
    starts: list[Start] = []
    for (node, environment), count in wanted.items():
        if node in starting or busy.get(node, 0.0) > now_s or have[node, environment] >= count or room < 1:
            continue
        if not _fits(config, living[node], [each for each in processes if each.node == node], environment, sizes):
            continue
        starting.add(node)
        room -= 1
        reason = f"{have[node, environment]} of {count} processes of environment {environment} are on the node"
        starts.append(Start(node=node, environment=environment, reason=reason))
    return (*ends, *starts)


def _sizes(processes: Sequence[PooledProcess]) -> dict[str, int]:
    """Return the memory of a process, keyed by environment [bytes]: the largest observed so far."""
    sizes: dict[str, int] = {}
    for each in processes:
        if each.memory_bytes:
            sizes[each.environment] = max(sizes.get(each.environment, 0), each.memory_bytes)
    return sizes


def _allot(
    config: PoolConfig, nodes: Mapping[str, PoolNode], sizes: Mapping[str, int], requests: Sequence[ProcessRequest]
) -> dict[tuple[str, str], int]:
    """Return the number of processes per node and environment, within all limits, most urgent request first.

    Requests for the same node are not added up, because a process that one job claims is soon replaced.
    """
    wanted: dict[tuple[str, str], int] = {}
    on_node: collections.Counter[str] = collections.Counter()
    memory: collections.Counter[str] = collections.Counter()
    for request in requests:
        size = sizes.get(request.environment, _ESTIMATE_BYTES)
        for node, count in sorted(request.nodes.items()):
            if node not in nodes:
                continue
            key = node, request.environment
            most = _memory(config, nodes[node])
            while (
                wanted.get(key, 0) < count
                and on_node[node] < config.per_node
                and on_node.total() < config.total
                and memory[node] + size <= most
            ):
                wanted[key] = wanted.get(key, 0) + 1
                on_node[node] += 1
                memory[node] += size
    return wanted


def _memory(config: PoolConfig, node: PoolNode) -> float:
    return math.inf if node.memory_bytes is None else node.memory_bytes * config.memory_share


def _fits(
    config: PoolConfig, node: PoolNode, processes: Sequence[PooledProcess], environment: str, sizes: Mapping[str, int]
) -> bool:
    """True if a node has room for one more process, counting processes that are about to end as still present."""
    used = sum(each.memory_bytes or sizes.get(each.environment, _ESTIMATE_BYTES) for each in processes)
    one_more = sizes.get(environment, _ESTIMATE_BYTES)
    return len(processes) < config.per_node and used + one_more <= _memory(config, node)


def _ends(
    config: PoolConfig,
    there: set[str],
    living: Mapping[str, PoolNode],
    processes: Sequence[PooledProcess],
    wanted: Mapping[tuple[str, str], int],
) -> Iterable[End]:
    """Yield an end for each surplus process, and each process whose node is draining or gone."""
    kept: collections.Counter[tuple[str, str]] = collections.Counter()
    # What is ready stays before what is only starting.
    for each in sorted(processes, key=lambda process: (not process.ready, process.name)):
        key = each.node, each.environment
        kept[key] += 1
        if each.node not in living:
            yield End(name=each.name, reason="its node is going" if each.node in there else "its node is gone")
        elif kept[key] > wanted.get(key, 0):
            reason = f"{wanted.get(key, 0)} of its environment are wanted on its node, within the pool's bounds"
            yield End(name=each.name, reason=reason)
