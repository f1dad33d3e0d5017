"""SHELL: a job's workers with their placement groups and processes, which the controller owns."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_ray.background import Background
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.messages import ControllerMessage, GenerationSpec
from elastic_ray.membership.signals import Lost, Reserved, Stimulus
from elastic_ray.unit import nodes_of, place_in, process_names, worker_of
from elastic_ray.warm_pool.processes import Processes
from elastic_ray.worker.messages import GroupLost, RunFailed, RunResult, WorkerReregistration
from elastic_ray.worker.setup import Assignment, ProcessInfo
from placement.cluster.cluster import by_node, parts
from placement.ray_cluster import groups
from placement.ray_cluster.snapshot import group_name
from placement.text import first_line

logger = logging.getLogger(__name__)

_VACATE_S = 0.5
_ASK_OUTCOME_S = 10.0
_LOOK_S = 0.1
_SIBLING_S = 3.0  # after an error in one process of a unit, in which another's death is heard of
_WARM_MEMORY_BYTES = 2 << 30  # resident memory above which a leaving worker ends instead of waiting for another job
_WITHDRAWN_S = 2.0  # at the end of a job; Ray tries a group again after a second


class WorkerActors:
    """Ray actors of a job's workers, managed as the membership machine instructs.

    Each worker's resources are reserved by its own placement group. Its process is an actor outside that group and
    requests no resources itself. Both are detached: they outlive a controller that Ray restarts, and the restarted
    controller adopts them.
    """

    def __init__(
        self,
        spec: JobSpec,
        controller: Any,
        tell: Callable[[Stimulus], None],
        on_result: Callable[[str, RunResult], None],
        on_refusal: Callable[[str, Exception, bool], None],
    ) -> None:
        self._spec, self._tell, self._on_refusal, self._on_result = spec, tell, on_refusal, on_result
        self._token = secrets.token_hex(8)  # of two jobs that a process serves one after the other, both have a "w1"
        self.supply = Processes(spec, controller, self._token)
        self._tokens: dict[str, str] = {}
        self._groups: dict[str, Any] = {}
        self._room = groups.Room()
        self._fulfilled: set[str] = set()
        self._unit = spec.scheduling.unit_size
        self._actors: dict[str, Any] = {}  # by process, see process_names
        self._nodes: dict[str, str] = {}
        self._results: dict[str, RunResult] = {}
        self._background = Background()
        self._withdrawals = Background()
        self.process_infos: dict[str, ProcessInfo] = {}

    def reserve(self, worker: str, node: str) -> None:
        """Request a worker's resources on a node; a ``Reserved`` signal reports when they are available."""
        self._nodes[worker] = node
        self._background.start(self._await_reservation(worker))

    async def _await_reservation(self, worker: str) -> None:
        """Wait for free resources, reserve them, and notify the membership machine.

        Polling detects within about 0.2 s that another worker has released its resources. A placement group requested
        too early would wait up to a second for Ray's next attempt.
        """
        # The membership machine gives reservations up in its own time; this only bounds the wait.
        until_s = time.monotonic() + self._spec.elastic.reserve_timeout_s * 2
        while not await self._room.holds(self._spec.bundle, self._nodes.get(worker, ""), self._asking(worker) + 1):
            if worker not in self._nodes or time.monotonic() > until_s:
                return
            await asyncio.sleep(_LOOK_S)
        if worker not in self._nodes:
            return
        # Not by the worker's name alone: an earlier run's "w1" may be just going.
        name = group_name(self._spec.job, f"{worker}.{self._token}")
        group = self._groups[worker] = groups.reserve(self._spec.bundle, self._nodes[worker], name)
        if await groups.ready(group, until_s - time.monotonic()) and worker in self._groups:
            self._fulfilled.add(worker)
            self._tell(Reserved(worker=worker))

    def _asking(self, worker: str) -> int:
        """Return the number of workers on the same nodes whose placement groups are still pending."""
        own = parts(self._nodes.get(worker, "")).keys()
        unfulfilled = self._groups.keys() - self._fulfilled
        return sum(bool(own & parts(self._nodes.get(other, "")).keys()) for other in unfulfilled)

    def reserved(self) -> dict[str, int]:
        """Return the number of reservations that have been granted, keyed by node."""
        counts: dict[str, int] = {}
        for worker in self._fulfilled & self._groups.keys():
            counts[self._nodes[worker]] = counts.get(self._nodes[worker], 0) + 1
        return counts

    def processes(self) -> dict[str, str]:
        """Return the name of each worker's process, keyed by worker; empty for a process that a sweep has lent."""
        return {worker: self.supply.name_of(actor) for worker, actor in self._actors.items()}

    def homes(self) -> dict[str, str]:
        """Return the node of each worker's process, keyed by process name."""
        return {name: node for name in self._actors if (node := self._node_of(name))}

    def _node_of(self, process: str) -> str:
        """Return the node of a process; empty if its worker has no place."""
        place = self._nodes.get(worker_of(process), "")
        return nodes_of(place, self._unit)[int(process.partition(".")[2] or 0)]

    def gpu_type(self, spec: GenerationSpec) -> str | None:
        """Return the GPU type that all nodes of a generation share, empty if unknown; None if the types differ."""
        types = {self.process_infos[m.worker].gpu_type for m in spec.members if m.worker in self.process_infos}
        return next(iter(types), "") if len(types) <= 1 else None

    def with_facts(self, spec: GenerationSpec, speeds: Mapping[str, float] | None) -> GenerationSpec:
        """Return the generation, adding known facts about its members' processes.

        The facts are each process's network domain and, unless ``speeds`` is None, its GPU type and the type's speed
        [samples/s].
        """
        members = []
        for member in spec.members:
            if (info := self.process_infos.get(member.worker)) is not None:
                gpu = info.gpu_type if speeds is not None else ""
                speed = speeds.get(gpu, 0.0) if speeds is not None else 0.0
                member = dataclasses.replace(member, domain=info.domain, gpu_type=gpu, speed=speed)
            members.append(member)
        return dataclasses.replace(spec, members=tuple(members))

    def launch(self, assignment: Assignment) -> None:
        """Run the train function as ``assignment`` describes, in a warm process on the node, or in a new one."""
        self._background.start(self._run(dataclasses.replace(assignment, token=self._token)))

    async def _run(self, assignment: Assignment) -> None:
        """Get a process, run the train function in it, and wait for the run to end."""
        worker, node = assignment.worker, assignment.node
        try:
            homes = nodes_of(node, self._unit)
            taken = await asyncio.gather(*(self.supply.take(home) for home in homes))
            group = self._groups.get(worker)
            if group is None:  # given back meanwhile
                for home, (actor, _) in zip(homes, taken, strict=True):
                    self.supply.rest(home, actor)
                return
            for name, (actor, process_info) in zip(process_names(worker, self._unit), taken, strict=True):
                self._actors[name], self.process_infos[name] = actor, process_info
            if taken[0][1].cuda:
                assignment = await self._with_gpus(assignment)
            assignment = dataclasses.replace(assignment, group=group.id.hex())
            running = [
                actor.run.remote(each) for (actor, _), each in zip(taken, self._in_unit(assignment), strict=True)
            ]
        except (RayError, asyncio.TimeoutError) as error:
            if isinstance(error, RuntimeEnvSetupError):
                self._on_refusal(worker, error, False)
            else:
                self._tell(Lost(worker=worker, cause=_cause(error)))
            return
        except Exception as error:  # Ray refuses what it is asked for, or a setting of the node is not understood
            logger.exception("job %s: worker %s has no process", self._spec.job, worker)
            self._on_refusal(worker, error, True)
            return
        if self._unit > 1:
            await self._watch_unit(worker, [actor for actor, _ in taken], self._token, running)
        else:
            await self._watch(worker, taken[0][0], self._token, running[0])

    async def _watch(self, worker: str, actor: Any, token: str, running: Any = None) -> None:
        """Wait for the end of a run or of its process, and report it."""
        self._notify_end(worker, await self._outcome(actor, token, worker, running))

    async def _outcome(self, actor: Any, token: str, worker: str, running: Any) -> RunResult | str:
        """Return how a run ended, or a string with the reason if its process is gone."""
        try:
            while (result := await actor.outcome.remote(token, worker, _ASK_OUTCOME_S)) is None:
                if running is not None and ray.wait([running], timeout=0, fetch_local=False)[0]:
                    await running  # it could not even begin
        except RayTaskError as error:  # it has ended, and how cannot be told, now or later
            return RunFailed(error=RuntimeError(f"worker {worker}: {_cause(error.cause or error)}"))
        except (RayError, asyncio.TimeoutError) as error:
            return _cause(error)
        found: RunResult = result
        return found

    def _in_unit(self, assignment: Assignment) -> list[Assignment]:
        """Return the assignment for each process of the worker."""
        if self._unit == 1:
            return [assignment]
        alone = len(parts(assignment.node)) == 1
        store = f"{tempfile.gettempdir()}/elastic-ray-{secrets.token_hex(8)}/unit" if alone else ""
        gpus = len(assignment.gpu_ids) // self._unit
        return [
            dataclasses.replace(
                assignment,
                unit=place_in(self._spec.scheduling.unit, position, store),
                gpu_ids=assignment.gpu_ids[position * gpus : (position + 1) * gpus],
            )
            for position in range(self._unit)
        ]

    async def _watch_unit(self, worker: str, actors: Sequence[Any], token: str, running: Sequence[Any]) -> None:
        """Wait until the run has ended in all processes of a unit, or until the first of them is lost or raises."""
        outcomes = [
            asyncio.ensure_future(self._outcome(actor, token, worker, each))
            for actor, each in zip(actors, running, strict=True)
        ]
        try:
            waiting: set[asyncio.Future[RunResult | str]] = set(outcomes)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                ends = [each.result() for each in done]
                failed = [each for each in ends if isinstance(each, str | RunFailed | GroupLost)]
                if failed and not isinstance(failed[0], str):  # is it because another one is gone?
                    more, _ = await asyncio.wait(waiting, timeout=_SIBLING_S) if waiting else (set(), None)
                    ends = [each.result() for each in (*done, *more)]
                    failed = [each for each in ends if isinstance(each, str)] or failed
                if failed:
                    self._notify_end(worker, failed[0])
                    return
            for name, each in zip(process_names(worker, self._unit), outcomes, strict=True):
                end = each.result()
                assert not isinstance(end, str), "it would have failed"
                self._results[name] = end
            self._on_result(worker, self._results[worker])
        finally:
            for each in outcomes:
                each.cancel()

    def _notify_end(self, worker: str, end: RunResult | str) -> None:
        """Report how a run ended, or, if ``end`` is a string, that its process was lost for that reason."""
        if isinstance(end, str):
            self._tell(Lost(worker=worker, cause=end))
            return
        self._results[worker] = end
        self._on_result(worker, end)

    def adopt(self, unit: Sequence[WorkerReregistration]) -> None:
        """Adopt a running worker of an earlier controller, given its unit's registrations in order of position."""
        first, worker = unit[0], unit[0].worker
        self._groups[worker], self._nodes[worker] = groups.find(first.group), first.node
        self._fulfilled.add(worker)
        self._tokens[worker] = first.token
        for told in unit:
            self._actors[told.name], self.process_infos[told.name] = told.actor, told.process_info
            self.supply.adopt(told.actor, told.process, lent=told.lent)
        if len(unit) > 1:
            running = [None] * len(unit)
            self._background.start(self._watch_unit(worker, [told.actor for told in unit], first.token, running))
        else:
            self._background.start(self._watch(worker, first.actor, first.token))

    def knows(self, worker: str, token: str) -> bool:
        """True if the worker has a process with this token, whichever controller of the job started it."""
        return token in (self._token, self._tokens.get(worker))

    async def _with_gpus(self, assignment: Assignment) -> Assignment:
        """Return the assignment with the GPU ids of its reservation, which a task inside each bundle can see."""
        group = self._groups[assignment.worker]
        probe: Any = ray.remote(_gpu_ids)
        ids: list[int] = []
        for index, share in enumerate(by_node({assignment.node: 1}).values()):
            ids += await probe.options(
                num_cpus=0,
                num_gpus=round(self._spec.bundle.get("GPU", 0) * share, 4),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            ).remote()
        return dataclasses.replace(assignment, gpu_ids=tuple(ids))

    def release(self, worker: str, *, kill: bool) -> None:
        """Release a worker's resources; end its process if ``kill`` is True, else return it to the warm pool."""
        homes = nodes_of(self._nodes.pop(worker, ""), self._unit)
        self._tokens.pop(worker, None)
        group = self._groups.pop(worker, None)
        if group is not None and worker in self._fulfilled:
            groups.release(group)
        elif group is not None:
            self._withdrawals.start(groups.withdraw(group))
        self._fulfilled.discard(worker)
        for node, name in zip(homes, process_names(worker, self._unit), strict=True):
            actor, result = self._actors.pop(name, None), self._results.pop(name, None)
            self.process_infos.pop(name, None)
            if actor is None:
                continue
            fit = (
                not kill
                and result is not None
                and not result.cuda_used  # its context would hold memory of a GPU that others use now
                and result.memory_bytes <= _WARM_MEMORY_BYTES
            )
            if fit:
                self.supply.rest(node, actor)
            else:
                self.supply.end(actor)

    async def is_running(self, worker: str, timeout_s: float) -> bool | None:
        """True if the worker's process is running, as seen by another process on its node; None if unknown.

        A process that is stopped, a zombie, or gone is not running. A process that is starved of CPU time or holds
        the GIL for long still counts as running.
        """
        node, process_info = self._node_of(worker), self.process_infos.get(worker)
        others = [actor for other, actor in self._actors.items() if other != worker and self._node_of(other) == node]
        witness = self.supply.witness(node) or next(iter(others), None)
        if witness is None or process_info is None:
            return None
        try:
            return bool(await asyncio.wait_for(witness.sees_running.remote(process_info.pid), timeout_s))
        except (RayError, asyncio.TimeoutError):
            return None

    def post(self, workers: Iterable[str], message: ControllerMessage) -> None:
        """Send a message to workers, skipping those without a process."""
        for worker in workers:
            for name in process_names(worker, self._unit):
                actor = self._actors.get(name)
                if actor is not None:
                    actor.post.remote(self._tokens.get(worker, self._token), worker, message)

    def disband(self) -> None:
        """Release all resources and end all processes."""
        for worker in list(self._nodes):
            self.release(worker, kill=True)
        self._background.cancel()
        self.supply.close(fit=False)

    async def vacate(self) -> None:
        """Release all resources, and leave the processes reusable for another trial.

        Workers that were told to stop have half a second to leave their train function.
        """
        deadline_s = time.monotonic() + _VACATE_S
        while time.monotonic() < deadline_s and any(self._may_come_out(worker) for worker in self._actors):
            await asyncio.sleep(0.01)
        for worker in list(self._nodes):
            self.release(worker, kill=worker not in self._results)
        self._background.cancel()
        self.supply.close(fit=True)
        await self.withdrawn()

    async def withdrawn(self) -> None:
        """Wait until pending reservations are withdrawn; they would otherwise count for the next job of this name."""
        await self._withdrawals.finish(_WITHDRAWN_S)

    def _may_come_out(self, worker: str) -> bool:
        process_info = self.process_infos.get(worker)
        return worker not in self._results and process_info is not None and not process_info.cuda


def _gpu_ids() -> list[int]:
    return [int(index) for index in ray.get_gpu_ids()]


def _cause(error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return "its process died"
    return first_line(error)
