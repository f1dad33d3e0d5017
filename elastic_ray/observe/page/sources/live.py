"""SHELL: page of a running cluster, read through Ray from its allocator, controllers and control store."""

from __future__ import annotations

import re
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from elastic_ray.events import JobEvent
from elastic_ray.job_spec import JobSpec
from elastic_ray.observe.page.cluster_page import ClusterPage
from elastic_ray.observe.page.model import JobDetail, PageSnapshot
from elastic_ray.observe.page.source import ActionRefusedError, ClusterLook, JobAnswer, JobFacts, JobLook, NodeLook
from elastic_ray.observe.process_look import LookRefusedError, inspect_process
from placement.allocator.snapshot import AllocatorLook
from placement.cluster.cluster import schedulable
from placement.errors import InputError
from placement.policies import POLICIES
from placement.ray_cluster.named_actors import ALLOCATOR, find_actor, names_of_actors
from placement.simulator.results.outlook import Outlook, outlook, read_nodes
from placement.text import count, first_line, printable

MOST_JOBS, MOST_NODES = 200, 1000
_SIZES = re.compile(r":(\d+)x(\d+)")
_MOST_TEXT = 200


def compare(
    look: AllocatorLook | None, nodes: str, policy: str, now_s: float
) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
    """Return each job's outlook (expected size and end) at present, and on other nodes or under another policy.

    Args:
        nodes: Other cluster, such as ``T4:4x8``; empty for the current nodes.
        policy: Name of a registered policy; empty for the cluster's current policy.
    """
    views = [state.view for state in look.core.jobs.values()] if look is not None else []
    if look is None or not views:
        raise InputError("no elastic job runs on this cluster, so there is nothing to ask about")
    if len(views) > MOST_JOBS:
        raise InputError(f"at most {MOST_JOBS} jobs are asked about here, but {len(views)} run")
    # A policy of a user's own is code, which no page may name.
    if policy and policy not in POLICIES:
        raise InputError(f"policy must be one of {', '.join(sorted(POLICIES))}, but got {policy!r}")
    if look.core.policy not in POLICIES:
        raise InputError(f"the cluster's policy {look.core.policy!r} is a user's own: ask with `simulate --live`")
    if len(nodes) > _MOST_TEXT:
        raise InputError(f"nodes must be at most {_MOST_TEXT} characters, but got {len(nodes)}")
    sizes = [(int(count), int(devices)) for count, devices in _SIZES.findall(nodes)]
    if sum(count for count, _ in sizes) > MOST_NODES or any(devices > MOST_NODES for _, devices in sizes):
        raise InputError(f"nodes must be {MOST_NODES} at most, with as many devices each, but got {nodes!r}")
    other = read_nodes(nodes, views) if nodes else look.core.cluster
    rules = look.core.constraints
    now = outlook(views, look.core.cluster, look.core.policy, now_s, stay=True, constraints=rules)
    return now, outlook(views, other, policy or look.core.policy, now_s, constraints=rules)


_PREFIX = "job:"
_ANSWER_S = 3.0  # of all that are asked in one look
_ACTION_S = 10.0
_PERIOD_S = 0.5
_REST = 3.0  # times the allocator's answer took
_LONGEST_S = 5.0
_EXPLAINED_S = 3.0
_MOST_ASKED = 64  # controllers in one look: of a thousand each has its turn every eight seconds
_DONE = {
    "resize": "held at {workers} workers",
    "release": "its size is the allocator's again",
    "pause": "it is saved after the step in progress and gives its slots back",
    "resume": "it continues as soon as there are slots for it",
    "stop": "it stops after the step in progress",
}


class LiveCluster:
    """Data source of the page for the running cluster that this process has joined."""

    def __init__(self, name: str, *, actions: bool) -> None:
        self._page = ClusterPage(name, actions=actions)
        self._controllers: dict[str, Any] = {}  # by the actor's name
        self._jobs: dict[str, str] = {}  # job by actor
        self._told: dict[str, int] = {}  # events by job
        self._facts: dict[str, JobFacts] = {}
        self._answers: dict[str, tuple[float, JobAnswer]] = {}
        self._turn = 0
        self._answer_s = 0.0

    @property
    def period_s(self) -> float | None:
        """Time between two polls [s]; longer if the allocator is slow to answer, to avoid overloading it."""
        return max(_PERIOD_S, min(_REST * self._answer_s, _LONGEST_S))

    def poll(self, now_s: float) -> PageSnapshot:
        """Poll the allocator, controllers and control store, and return the entire page."""
        problem, allocator = "", None
        nodes: tuple[NodeLook, ...] = ()
        jobs: tuple[JobLook, ...] = ()
        try:
            nodes = _nodes()
            allocator = self._ask_allocator()
            self._find_controllers()
            jobs = self._ask_controllers()
        except (RayError, ConnectionError, RuntimeError) as error:
            problem = f"the cluster does not answer: {printable(first_line(error))}"
        alive = frozenset(self._jobs.get(actor, actor.removeprefix(_PREFIX)) for actor in self._controllers)
        self._page.take(
            ClusterLook(now_s=now_s, allocator=allocator, jobs=jobs, alive=alive, nodes=nodes, problem=problem)
        )
        return self._page.snapshot(now_s, problem)

    def _ask_allocator(self) -> AllocatorLook | None:
        """Return the allocator's state; None if no allocator is running or it does not answer."""
        allocator = find_actor(ALLOCATOR)
        if allocator is None:
            return None
        begun_s = time.monotonic()
        try:
            look: AllocatorLook = ray.get(allocator.poll.remote(*self._page.known), timeout=_ANSWER_S)
        except (RayActorError, GetTimeoutError):
            return None
        finally:
            self._answer_s = time.monotonic() - begun_s
        return look

    def _find_controllers(self) -> None:
        """Find the living controllers and discard all data stored about others."""
        there = names_of_actors(_PREFIX)
        known = {name: self._controllers[name] for name in there if name in self._controllers}
        found = {name: find_actor(name) for name in there if name not in known}
        self._controllers = {**known, **{name: each for name, each in found.items() if each is not None}}
        self._jobs = {actor: job for actor, job in self._jobs.items() if actor in self._controllers}
        here = set(self._jobs.values())  # another job of a name that has ended tells everything anew
        self._told = {job: count for job, count in self._told.items() if job in here}
        self._facts = {job: facts for job, facts in self._facts.items() if job in here}
        self._answers = {job: each for job, each in self._answers.items() if job in here}

    def _ask_controllers(self) -> tuple[JobLook, ...]:
        """Return the answers of the controllers whose turn it is; a late one is asked again in its next turn."""
        actors = sorted(self._controllers)
        if len(actors) > _MOST_ASKED:
            begin = self._turn % len(actors)
            actors = [*actors[begin:], *actors[:begin]][:_MOST_ASKED]
            self._turn = begin + _MOST_ASKED
        calls = {actor: self._call(actor) for actor in actors}
        refs = [ref for own in calls.values() for ref in own]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_S)
        looks = (self._read(actor, *own) for actor, own in calls.items())
        return tuple(look for look in looks if look is not None)

    def _call(self, actor: str) -> list[Any]:
        """Request a controller's status and new events, and its specification if that is not yet known."""
        controller, job = self._controllers[actor], self._jobs.get(actor)
        calls = [controller.status.remote(), controller.events.remote(self._told.get(job, 0) if job else 0)]
        return calls if job in self._facts else [*calls, controller.spec.remote()]

    def _read(self, actor: str, status: Any, events: Any, spec: Any = None) -> JobLook | None:
        """Return a controller's answers; None if it has not answered yet, or is now running another trial."""
        answer = _ready(status)
        if answer is None:
            return None
        job = answer.job
        if self._jobs.get(actor) != job and actor in self._jobs:
            self._jobs[actor] = job  # its events are asked from the beginning next time
            return None
        self._jobs[actor] = job
        told = _ready(spec) if spec is not None else None
        if isinstance(told, JobSpec):
            limits = told.min_workers, told.max_workers
            self._facts[job] = JobFacts(min_workers=limits[0], max_workers=limits[1], storage=told.storage_path)
        new: tuple[JobEvent, ...] = _ready(events) or ()
        self._told[job] = self._told.get(job, 0) + len(new)
        return JobLook(job=job, status=answer, facts=self._facts.get(job), events=tuple(new))

    def detail(self, job: str) -> JobDetail | None:
        """Return the details of a job, requesting some from its controller and the allocator."""
        return self._page.detail(job, self._answer(job), time.time())

    def _answer(self, job: str) -> JobAnswer:
        """Return the answers about one job, requested at most every few seconds regardless of the number of viewers.

        The limit exists because the allocator must make a decision to explain a job.
        """
        known = self._answers.get(job)
        if known is not None and time.monotonic() - known[0] < _EXPLAINED_S:
            return known[1]
        controller, allocator = self._controller(job), find_actor(ALLOCATOR)
        workers = _get(controller.workers.remote()) if controller is not None else None
        why = _get(allocator.explain.remote(job)) if allocator is not None and controller is not None else None
        answer = JobAnswer(workers=tuple(workers or ()), explanation=why)
        if controller is not None:
            self._answers[job] = time.monotonic(), answer
        return answer

    def _controller(self, job: str) -> Any | None:
        """Return the controller that is currently running this job; None if not found."""
        return next((self._controllers[actor] for actor, name in self._jobs.items() if name == job), None)

    def process(self, job: str, rank: int, what: str) -> str:
        """Return a worker's last output or thread stacks; see :meth:`Source.process`."""
        controller = self._controller(job)
        workers = (_get(controller.workers.remote()) if controller is not None else None) or ()
        worker = next((each for each in workers if each.rank == rank), None)
        if worker is None:
            raise ActionRefusedError(f"job {job!r} has no worker of rank {rank} now, but {count(len(workers))}")
        try:
            return inspect_process(worker, what)
        except LookRefusedError as error:
            raise ActionRefusedError(str(error)) from None

    def what_if(self, nodes: str, policy: str, now_s: float) -> tuple[tuple[Outlook, ...], tuple[Outlook, ...]]:
        """Return each running job's outlook on current and on other nodes; see :meth:`Source.what_if`."""
        return compare(self._page.allocator, nodes, policy, now_s)

    def act(self, job: str, action: str, workers: int | None) -> str:
        """Resize, release, pause, resume or stop a job; see :meth:`Source.act`."""
        controller = self._controller(job)
        if controller is None:
            raise ActionRefusedError(f"there is no job {job!r}; ended jobs are not kept")
        done = _DONE[action].format(workers=workers)  # first: no other method of a controller is called
        given = {"resize": (workers,), "pause": ("paused from the page",)}.get(action, ())
        try:
            phase = ray.get(controller.status.remote(), timeout=_ACTION_S).phase
            if phase.ended:  # its driver has not collected the result yet
                raise ActionRefusedError(f"job {job!r} has ended ({phase.value})")
            ray.get(getattr(controller, action).remote(*given), timeout=_ACTION_S)
            return done
        except GetTimeoutError:
            raise ActionRefusedError(f"the controller has not answered within {_ACTION_S:g} s") from None
        except RayTaskError as error:
            raise ActionRefusedError(printable(str(error.cause or error))) from None
        except RayActorError:
            raise ActionRefusedError("it has just ended") from None


def _nodes() -> tuple[NodeLook, ...]:
    """Return the living nodes, without the resources that Ray uses for its own bookkeeping."""
    return tuple(
        NodeLook(
            node=str(node["NodeID"]),
            address=str(node.get("NodeManagerAddress", "")),
            total={
                name: amount
                for name, amount in schedulable(node["Resources"]).items()
                if not name.startswith(("object_store_memory", "accelerator_type:"))
            },
            labels=dict(node.get("Labels") or {}),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    )


def _ready(ref: Any) -> Any | None:
    """Return the result of ``ref`` if it has arrived and can be read here; otherwise None."""
    try:
        return ray.get(ref, timeout=0)
    except Exception:
        return None


def _get(ref: Any) -> Any | None:
    """Return the result of ``ref``; None on an error or if it does not arrive in time."""
    try:
        return ray.get(ref, timeout=_ANSWER_S)
    except RayError:
        return None
