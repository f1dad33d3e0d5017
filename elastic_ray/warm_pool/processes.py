"""SHELL: worker processes available to a job, which belong to the job, its sweep, or the cluster's warm pool."""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ray.background import Background
from elastic_ray.job_spec import JobSpec
from elastic_ray.warm_pool.client import PoolClient
from elastic_ray.worker.ownership import calling_owner
from elastic_ray.worker.process import WorkerProcess
from elastic_ray.worker.setup import ProcessInfo, ProcessOwner, WorkerSetup
from placement.ray_cluster.named_actors import NAMESPACE, actor_class, actors_named
from placement.versions import spoken

logger = logging.getLogger(__name__)

# ``run`` occupies a thread for the length of the training and ``outcome`` another, for some seconds also that of a
# controller which is gone; messages need some beside them.
_THREADS = 6
_ANSWER_S = 5.0  # of a process that is warm, or of the sweep
_ORDER_EVERY_S = 1.0
_FAREWELL_S = 10.0  # nobody waits for it
_COLD_S = 30.0  # no other warm process on a node for so long after one could not be had, as on one that drains


def end_strays(job: str, keep: Collection[str]) -> None:
    """Kill the job's processes, even starting ones, that no controller knows and ``keep`` does not list. Blocks."""
    for name, actor in actors_named(_prefix(job)):
        if name not in keep:
            ray.kill(actor)


def _prefix(job: str) -> str:
    return f"worker:{job}/"


def setup_of(spec: JobSpec, *, controller: Any = None, token: str = "") -> WorkerSetup:
    """Return the setup of a job's processes; ``controller`` and ``token`` are omitted for a sweep's processes."""
    return WorkerSetup(
        use_gpu=spec.use_gpu,
        cpus=spec.bundle.get("CPU", 1.0) / spec.scheduling.unit_size,
        storage_filesystem=spec.storage_filesystem,
        elastic=spec.elastic,
        log_level=spec.log_level,
        paced=spec.trial is not None,
        states_kept=spec.states_kept,
        controller=controller,
        token=token,
    )


def environment_of(spec: JobSpec) -> dict[str, Any]:
    """Return the Ray runtime environment of the job's worker processes."""
    environment: dict[str, Any] = dict(spec.runtime_env)
    if spec.use_gpu:
        # The process asks for no GPU itself and would see none; it takes those of its reservation.
        variables: Mapping[str, str] = environment.get("env_vars", {})
        environment["env_vars"] = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", **variables}
    return environment


def start_process(spec: JobSpec, node: str, owner: ProcessOwner | None, name: str) -> Any:
    """Start a worker process on a node. The caller must end it; it also exits by itself when its owner is gone.

    The process requests no resources. Ray cannot move a warm process into the placement group that reserves a
    worker's resources, but the process can run on the node where the group has reserved them.

    Args:
        owner: Owner of the process; None for a process in the cluster's pool, which has no owner yet.
    """
    return (
        actor_class(WorkerProcess)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=_THREADS,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env=environment_of(spec) or None,
        )
        .remote(owner, spoken())
    )


def pool_client(spec: JobSpec, owner: ProcessOwner) -> PoolClient:
    """Return a client that the owner can use to access the cluster's pool."""
    return PoolClient(owner, environment_of(spec), lambda node, name: start_process(spec, node, None, name))


class _Lent(enum.Enum):
    """State of a borrowed process: starting, contacted, or known to answer."""

    STARTING = enum.auto()
    ASKED = enum.auto()
    READY = enum.auto()


class Processes:
    """Supply of worker processes for one job.

    A process that a worker has left can be reused for the job's next worker. Other processes are claimed from the
    cluster's pool, where the job requests processes on its nodes; if the pool is off, the job keeps its own warm
    processes.

    The processes of a trial belong to its sweep: the trial returns them, and the next one starts in them within
    milliseconds.
    """

    def __init__(self, spec: JobSpec, controller: Any, token: str) -> None:
        self._spec = spec
        self._setup, self._setup_of_lent = setup_of(spec, controller=controller, token=token), setup_of(spec)
        self._ordering: asyncio.Task[None] | None = None
        self._ordered_s = 0.0
        self._used: dict[str, int] = {}
        self._sweep = spec.trial.sweep if spec.trial is not None else None
        self._run = spec.trial.controller if spec.trial is not None else ""
        self._names: dict[Any, str] = {}
        self._lent: dict[Any, _Lent] = {}
        self._warm: dict[str, list[Any]] = {}
        self._warming: set[str] = set()
        self._cold_until_s: dict[str, float] = {}
        self._background, self._farewell = Background(), Background()
        self._closed = False

    @functools.cached_property
    def _owner(self) -> ProcessOwner:
        return calling_owner(f"job:{self._spec.job}")

    @functools.cached_property
    def _pool(self) -> PoolClient:
        return pool_client(self._spec, self._owner)

    @property
    def _wanted(self) -> int:
        """Number of idle processes to keep per node; a unit's processes start together."""
        return self._spec.elastic.warm_workers_per_node * self._spec.scheduling.unit_size

    async def take(self, node: str) -> tuple[Any, ProcessInfo]:
        """Return a ready process on the node and its facts: the job's, its sweep's, the pool's, or else a new one."""
        warm = self._warm.get(node, [])
        while warm:
            actor = warm.pop()
            if (process_info := await self._answer(actor)) is not None:
                return actor, process_info
            self._kill(actor)
        while (lent := await self._borrow(node)) is not None:
            actor, ready = lent
            if not ready:
                return actor, await self._started(actor)
            self._lent[actor] = _Lent.ASKED
            if (process_info := await self._answer(actor)) is not None:
                self._lent[actor] = _Lent.READY
                return actor, process_info
            self.end(actor)
        self._used[node] = self._used.get(node, 0) + 1
        while (pooled := await self._pool.take(node)) is not None:
            actor, name = pooled
            self._names[actor] = name
            if (process_info := await self._answer(actor)) is not None:
                return actor, process_info
            self._kill(actor)
        return await self._start(node)

    async def _start(self, node: str) -> tuple[Any, ProcessInfo]:
        """Start a new process owned by the job, and return it once it is ready."""
        name = f"{_prefix(self._spec.job)}{secrets.token_hex(8)}"
        actor = start_process(self._spec, node, self._owner, name)
        self._names[actor] = name
        try:
            return actor, await actor.prepare.remote(self._setup)
        except BaseException:  # no other knows of it yet
            self._kill(actor)
            raise

    async def _answer(self, actor: Any) -> ProcessInfo | None:
        """Prepare a process and return its answer, or None if it does not answer."""
        try:
            setup = self._setup_of_lent if actor in self._lent else self._setup
            process_info: ProcessInfo = await asyncio.wait_for(actor.prepare.remote(setup), _ANSWER_S)
        except (RayError, asyncio.TimeoutError):
            return None
        except asyncio.CancelledError:
            if actor not in self._lent:
                self._kill(actor)
            raise
        return process_info

    def name_of(self, actor: Any) -> str:
        """Return the name of one of the job's processes; empty if a sweep has lent the process."""
        return self._names.get(actor, "")

    async def _borrow(self, node: str) -> tuple[Any, bool] | None:
        """Borrow a process from the sweep; return it and whether it is ready, or None if the sweep lends none."""
        if self._sweep is None:
            return None
        try:
            lent: tuple[Any, bool] | None = await asyncio.wait_for(self._sweep.lend.remote(self._run, node), _ANSWER_S)
        except (RayError, asyncio.TimeoutError) as error:
            logger.warning("job %s: its sweep lends no process, so it starts one: %s", self._spec.job, error)
            return None
        return lent

    async def _started(self, actor: Any) -> ProcessInfo:
        """Wait, without a timeout, for a borrowed process that is still starting."""
        self._lent[actor] = _Lent.STARTING
        try:
            process_info: ProcessInfo = await actor.prepare.remote(self._setup_of_lent)
        except RayError:
            self.end(actor)
            raise
        self._lent[actor] = _Lent.READY
        return process_info

    def adopt(self, actor: Any, name: str, *, lent: bool) -> None:
        """Adopt a process that an earlier controller of the job started or, if ``lent``, borrowed from a sweep."""
        if lent:
            self._lent[actor] = _Lent.READY
        else:
            self._names[actor] = name

    def rest(self, node: str, actor: Any) -> None:
        """Put aside a process for reuse: return it to its sweep, or keep it warm if the job wants more; else end it."""
        warm = self._warm.setdefault(node, [])
        if actor in self._lent:
            self._give_back(actor, fit=True)
        elif len(warm) < self._wanted and not self._closed:
            warm.append(actor)
        else:
            self._kill(actor)

    def end(self, actor: Any) -> None:
        """End a process that cannot be reused; if a sweep has lent it, inform the sweep."""
        if actor in self._lent:
            self._give_back(actor, fit=False)
        else:
            self._kill(actor)

    def _kill(self, actor: Any) -> None:
        self._names.pop(actor, None)
        ray.kill(actor)

    def _give_back(self, actor: Any, *, fit: bool) -> None:
        if self._closed:
            return  # it was given back with all others, and may be another trial's by now
        if not fit:
            ray.kill(actor)  # at once, also if the sweep is busy
        del self._lent[actor]
        assert self._sweep is not None, "only a sweep lends"
        self._sweep.take_back.remote(self._run, actor, fit=fit)

    def witness(self, node: str) -> Any | None:
        """Return a warm process that can check whether other processes on the node run; None if no process can."""
        return next(iter(self._warm.get(node, [])), None) or self._pool.witness(node)

    def keep_warm(self, nodes: Mapping[str, int]) -> None:
        """Keep warm processes on these nodes, and end the job's own warm processes on all other nodes."""
        for node in set(self._warm) - set(nodes):
            for actor in self._warm.pop(node):
                self._kill(actor)
        wanted, unit = self._wanted, self._spec.scheduling.unit_size
        if not wanted or not nodes:
            return
        if self._pool.on:
            # As many as its next start would take, and beside them those with which it then grows and replaces at once.
            self._order({node: wanted + workers * unit for node, workers in nodes.items()})
        elif not self._warming:
            self._warm_one(nodes, wanted)

    def _order(self, nodes: dict[str, int]) -> None:
        now_s = time.monotonic()
        asks = self._ordering is not None and not self._ordering.done()
        if not nodes or asks or now_s < self._ordered_s + _ORDER_EVERY_S:
            return
        self._ordered_s = now_s
        self._used = dict(nodes)
        self._ordering = self._background.start(self._pool.order(nodes))

    def _warm_one(self, nodes: Iterable[str], wanted: int) -> None:
        for node in sorted(nodes):
            is_cold = time.monotonic() < self._cold_until_s.get(node, 0.0)
            if not is_cold and len(self._warm.get(node, [])) < wanted:
                self._warming.add(node)
                self._background.start(self._warm_up(node))
                return

    async def _warm_up(self, node: str) -> None:
        """Start a process for later use; if that fails, start none on this node for a while."""
        try:
            actor, _ = await asyncio.wait_for(self._start(node), self._spec.elastic.join_timeout_s)
            self.rest(node, actor)
        except (RayError, asyncio.TimeoutError) as error:
            self._cold_until_s[node] = time.monotonic() + _COLD_S
            logger.info("job %s: no warm worker on node %s: %s", self._spec.job, node[:8], error)
        finally:
            self._warming.discard(node)

    async def refilled(self) -> None:
        """Wait until the pool knows that the job has ended, and the processes that it requested have been started."""
        await self._farewell.finish(_FAREWELL_S)

    def close(self, *, fit: bool) -> None:
        """End the job's warm processes and return borrowed ones to the sweep, as reusable if ``fit`` and responsive."""
        self.keep_warm({})
        self._background.cancel()
        if self._used and self._spec.elastic.warm_workers_per_node and not self._closed:
            self._farewell.start(self._pool.order(self._used, over=True))  # for the next job
        self._closed = True
        if self._sweep is not None:
            # One that was asked and has not answered may hang.
            kept = {actor: state is _Lent.READY for actor, state in self._lent.items() if state is not _Lent.ASKED}
            self._sweep.complete.remote(self._run, kept if fit else {})
