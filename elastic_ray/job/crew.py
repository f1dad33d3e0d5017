"""SHELL: a job's worker processes, their placement groups, and the warm pool (owned by the job's controller)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from elastic_ray.job.messages import Assignment, ProcessFacts, RunResult, WorkerSetup
from elastic_ray.job.spec import JobSpec
from elastic_ray.job.worker_process import WorkerProcess
from elastic_ray.membership.plan import Message, Plan
from elastic_ray.membership.signals import Lost, Reserved, Stimulus
from placement import groups
from placement.jobs import FIRST_WORKERS
from placement.snapshot import group_name

logger = logging.getLogger(__name__)

# ``run`` occupies a thread for the length of the training; messages need some beside it.
_THREADS = 4
_VACATE_S = 0.5
_COLD_S = 30.0  # no other warm process on a node for so long after one could not be had, as on one that drains


class Crew:
    """Carries out what the membership machine wants done with workers, and says what became of it.

    A worker's resources are reserved by a placement group of its own, which the controller owns; its process is
    an actor beside the group that asks for nothing itself. Ray could not move a process that is warm
    into a group, but it can run where the group has reserved the room.

    Args:
        spec: the job.
        controller: handle of this controller, for the workers.
        tell: takes what happened to a worker.
        on_result: takes how a run ended.
        warm: processes to begin with by node, those that :meth:`vacate` has kept of a job just like this one.
    """

    def __init__(
        self,
        spec: JobSpec,
        controller: Any,
        tell: Callable[[Stimulus], None],
        on_result: Callable[[str, RunResult], None],
        warm: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._spec = spec
        self._controller = controller
        self._tell = tell
        self._on_result = on_result
        self._setup = WorkerSetup(
            use_gpu=spec.use_gpu,
            cpus=spec.bundle.get("CPU", 1.0),
            storage_filesystem=spec.storage_filesystem,
            elastic=spec.elastic,
            log_level=spec.log_level,
            paced=spec.trial is not None,
            states_kept=spec.states_kept,
        )
        # A trial starts no process before it needs one; those that it has had, and started in vain, it keeps.
        self._most_warm = max(spec.elastic.warm_workers_per_node, FIRST_WORKERS if spec.trial is not None else 0)
        self._groups: dict[str, Any] = {}
        self._fulfilled: set[str] = set()
        self._actors: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        self._results: dict[str, RunResult] = {}
        self._warm: dict[str, list[Any]] = {node: list(actors) for node, actors in (warm or {}).items()}
        self._warming: set[str] = set()
        self._cold_until_s: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.facts: dict[str, ProcessFacts] = {}

    # -- resources ---------------------------------------------------------------------------------------------

    def reserve(self, worker: str, node: str) -> None:
        """Ask for the worker's resources; ``Reserved`` follows when they are there."""
        self._groups[worker] = groups.reserve(self._spec.bundle, node, group_name(self._spec.job, worker))
        self._nodes[worker] = node
        self._spawn(self._await_reservation(worker))

    async def _await_reservation(self, worker: str) -> None:
        group = self._groups.get(worker)
        # The membership machine gives reservations up in its own time; this only bounds the wait.
        if group is not None and await groups.ready(group, self._spec.elastic.reserve_timeout_s * 2):
            self._fulfilled.add(worker)
            self._tell(Reserved(worker=worker))

    def reserved(self) -> dict[str, int]:
        """Fulfilled reservations by node."""
        counts: dict[str, int] = {}
        for worker in self._fulfilled & self._groups.keys():
            counts[self._nodes[worker]] = counts.get(self._nodes[worker], 0) + 1
        return counts

    def gpu_type(self, plan: Plan) -> str | None:
        """GPU type of the nodes of a generation, empty where they do not say; None if they differ."""
        types = {self.facts[m.worker].gpu_type for m in plan.members if m.worker in self.facts}
        return next(iter(types), "") if len(types) <= 1 else None

    # -- processes ---------------------------------------------------------------------------------------------

    def launch(self, assignment: Assignment) -> None:
        """Run the train function in a warm process of the node, or in a new one."""
        self._spawn(self._run(assignment))

    async def _run(self, assignment: Assignment) -> None:
        worker = assignment.worker
        try:
            actor, facts = await self._process_on(assignment.node)
            if worker not in self._groups:  # given back meanwhile
                self._park_or_kill(assignment.node, actor)
                return
            self._actors[worker], self.facts[worker] = actor, facts
            if facts.cuda:
                assignment = await self._with_gpus(assignment)
            result = await actor.run.remote(assignment)
            self._results[worker] = result
            self._on_result(worker, result)
        except (RayError, asyncio.TimeoutError) as error:
            self._tell(Lost(worker=worker, cause=_first_line(error)))

    async def _process_on(self, node: str) -> tuple[Any, ProcessFacts]:
        warm = self._warm.get(node, [])
        while warm:
            actor = warm.pop()
            try:
                return actor, await asyncio.wait_for(actor.prepare.remote(), 5.0)
            except (RayError, asyncio.TimeoutError):
                ray.kill(actor)
        actor = self._new_process(node)
        return actor, await actor.prepare.remote()

    def _new_process(self, node: str) -> Any:
        actor: Any = ray.remote(WorkerProcess)
        environment = dict(self._spec.runtime_env)
        if self._spec.use_gpu:
            # The process asks for no GPU itself and would see none; it takes those of its reservation.
            variables = {
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
                **environment.get("env_vars", {}),
            }
            environment["env_vars"] = variables
        return actor.options(
            num_cpus=0,
            max_concurrency=_THREADS,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env=environment or None,
        ).remote(self._setup, self._controller)

    async def _with_gpus(self, assignment: Assignment) -> Assignment:
        """The GPUs behind the reservation: a task inside the group sees which they are."""
        group = self._groups[assignment.worker]
        probe: Any = ray.remote(_gpu_ids)
        ids = await probe.options(
            num_cpus=0,
            num_gpus=self._spec.bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
        ).remote()
        return dataclasses.replace(assignment, gpu_ids=tuple(ids))

    def release(self, worker: str, *, kill: bool) -> None:
        """Give a worker's resources back; its process rests in the warm pool, or ends."""
        actor, node = self._actors.pop(worker, None), self._nodes.pop(worker, "")
        result = self._results.pop(worker, None)
        self.facts.pop(worker, None)
        group = self._groups.pop(worker, None)
        self._fulfilled.discard(worker)
        if actor is not None:
            fit = (
                not kill
                and result is not None
                and not result.cuda_used  # its context would hold memory of a GPU that others use now
                and result.memory_bytes <= self._spec.elastic.warm_worker_memory_bytes
            )
            if fit:
                self._park_or_kill(node, actor)
            else:
                ray.kill(actor)
        if group is not None:
            groups.release(group)

    async def is_running(self, worker: str, timeout_s: float) -> bool | None:
        """Whether another process of the worker's node sees its process running; None where none can tell.

        A process that is stopped, a zombie or gone is not running; one that is starved or holds its own lock is.
        """
        node, facts = self._nodes.get(worker, ""), self.facts.get(worker)
        others = [actor for other, actor in self._actors.items() if other != worker and self._nodes[other] == node]
        witness = next(iter([*self._warm.get(node, []), *others]), None)
        if witness is None or facts is None:
            return None
        try:
            return bool(await asyncio.wait_for(witness.sees_running.remote(facts.pid), timeout_s))
        except (RayError, asyncio.TimeoutError):
            return None

    def post(self, workers: Iterable[str], message: Message) -> None:
        """Tell workers something; one that is gone misses nothing."""
        for worker in workers:
            actor = self._actors.get(worker)
            if actor is not None:
                actor.post.remote(worker, message)

    # -- the warm pool -----------------------------------------------------------------------------------------

    def _park_or_kill(self, node: str, actor: Any) -> None:
        warm = self._warm.setdefault(node, [])
        if len(warm) < self._most_warm:
            warm.append(actor)
        else:
            ray.kill(actor)

    def keep_warm(self, nodes: Iterable[str]) -> None:
        """Fill the pool on these nodes, one process at a time, and end warm processes elsewhere."""
        wanted = set(nodes)
        for node in set(self._warm) - wanted:
            for actor in self._warm.pop(node):
                ray.kill(actor)
        if self._warming:
            return
        for node in sorted(wanted):
            if (
                time.monotonic() >= self._cold_until_s.get(node, 0.0)
                and len(self._warm.get(node, [])) < self._spec.elastic.warm_workers_per_node
            ):
                self._warming.add(node)
                self._spawn(self._warm_up(node))
                return

    async def _warm_up(self, node: str) -> None:
        try:
            actor = self._new_process(node)
            await asyncio.wait_for(actor.prepare.remote(), self._spec.elastic.join_timeout_s)
            self._park_or_kill(node, actor)
        except (RayError, asyncio.TimeoutError) as error:
            self._cold_until_s[node] = time.monotonic() + _COLD_S
            logger.info("job %s: no warm worker on node %s: %s", self._spec.job, node[:8], _first_line(error))
        finally:
            self._warming.discard(node)

    # -- the end -----------------------------------------------------------------------------------------------

    def disband(self) -> None:
        """Give everything back."""
        for worker in list(self._groups):
            self.release(worker, kill=True)
        self.keep_warm(())
        for task in self._tasks:
            task.cancel()

    async def vacate(self) -> dict[str, list[Any]]:
        """Give everything back but processes that could run another job; these, by node.

        Those that are told to stop have half a second to come out of their train function.
        """
        deadline_s = time.monotonic() + _VACATE_S
        while time.monotonic() < deadline_s and any(self._may_come_out(worker) for worker in self._actors):
            await asyncio.sleep(0.01)
        for worker in list(self._groups):
            self.release(worker, kill=worker not in self._results)
        kept, self._warm = self._warm, {}
        self.disband()
        return kept

    def _may_come_out(self, worker: str) -> bool:
        facts = self.facts.get(worker)
        return worker not in self._results and facts is not None and not facts.cuda

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _gpu_ids() -> list[int]:
    return [int(index) for index in ray.get_gpu_ids()]


def _first_line(error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return "its process died"
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
