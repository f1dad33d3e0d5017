"""SHELL: how commands access the cluster: its jobs' controllers, its allocator and its nodes.

Controllers are called directly instead of through a ``JobHandle``, because viewing a job must neither renew its
driver's lease nor collect its result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import ray
from ray._private import worker as _ray_worker
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ray.access import HOW_TO_START, AccessRefusedError, check_access, check_answers, find_address
from elastic_ray.cli.listings import JobAnswers
from elastic_ray.events import JobEvent, JobPhase, JobStatus, WorkerInfo
from elastic_ray.record.ended import EndedJobNote
from placement.allocator.actor import PolicyConflictError, find_allocator, get_or_create_allocator
from placement.allocator.explaining import Explanation
from placement.allocator.settings import OperatorSettings
from placement.allocator.snapshot import CoreSnapshot
from placement.autoscaling.autoscaler import ScalingDecision
from placement.cluster.jobs import JobView
from placement.errors import InputError
from placement.policies import make_policy
from placement.ray_cluster import notes
from placement.ray_cluster.named_actors import ALLOCATOR, NAMESPACE, actors_named, call_within, find_actor

_CALL_TIMEOUT_S = 10.0  # counted from the first question of a command that an actor has not answered
_ANSWER_S = 5.0  # of many controllers together, or for a listing that says less without the answer
_AGAIN_S = 0.5  # for an answer of who has been silent so far
_START_S = 60.0  # of an allocator that may have to be made
_LOOK_S = 120.0  # at a node: a process starts there and imports torch
_POLL_S = 0.25
_PREFIX = "job:"
_SILENT = f"{__name__}.silent"
# What a controller is asked; all else is a command, which takes effect however late it is read.
_QUESTIONS = ("status", "events", "workers", "branched")


class RefusedError(click.ClickException):
    """Error raised if the cluster denies access to this process."""


def connect() -> None:
    """Connect to a running cluster as ``ray`` does: at RAY_ADDRESS, otherwise on this machine.

    Raises ClickException if no cluster is running or it cannot be joined, and RefusedError if the token is missing or
    wrong.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it tells of every token that it finds
    there = find_address(address)
    try:
        check_answers(there, address)
    except ConnectionError as error:
        raise click.ClickException(str(error)) from error
    _keep_output_clean()
    try:
        check_access(there, mode_is_open=address == "auto" and "RAY_AUTH_MODE" not in os.environ)
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except AccessRefusedError as error:
        raise RefusedError(str(error)) from error
    except ConnectionError as error:
        where = "no Ray cluster runs on this machine" if address == "auto" else f"no Ray cluster answers at {address}"
        raise click.ClickException(f"{where}; {HOW_TO_START}") from error
    except (RuntimeError, ValueError, OSError) as error:  # another version of Ray or Python
        raise click.ClickException(f"the Ray cluster at {address} cannot be joined: {error}") from error


def _keep_output_clean() -> None:
    """Drop what Ray tells of the cluster, such as lost workers: it would print that between the lines of a command."""
    theirs: Any = _ray_worker
    theirs.print_to_stdstream = lambda *_, **__: None


def joined_address() -> str:
    """Return HOST:PORT of the control store (GCS) in the cluster that ``connect`` has joined."""
    return str(ray.get_runtime_context().gcs_address)


def session() -> str:
    """Return the session name of the connected cluster's head; it is different for each head."""
    return str(ray.get_runtime_context().get_session_name())


def known_jobs() -> tuple[JobAnswers, ...]:
    """Return the status and specification of each running job or trial, as reported by its controller."""
    found, silent, begun_s = actors_named(_PREFIX), _silent(), time.monotonic()
    calls = {name: (controller.status.remote(), controller.spec.remote()) for name, controller in found}
    for patience_s, names in ((_ANSWER_S, calls.keys() - silent.keys()), (_AGAIN_S, calls.keys() & silent.keys())):
        if refs := [ref for name in names for ref in calls[name]]:
            _, late = ray.wait(refs, num_returns=len(refs), timeout=patience_s)
            for name in names:
                if set(calls[name]) & set(late):
                    silent.setdefault(name, begun_s)
                else:
                    silent.pop(name, None)
    answers = []
    for name, (status, spec) in calls.items():
        try:
            answers.append(JobAnswers(actor=name, status=_ready(status), spec=_ready(spec)))
        except RayActorError:  # it has just ended
            continue
    return tuple(answers)


def _silent() -> dict[str, float]:
    """Return the controllers that this command waits for in vain, by name, with the time of the first question [s]."""
    command = click.get_current_context(silent=True)
    silent: dict[str, float] = {} if command is None else command.meta.setdefault(_SILENT, {})
    return silent


def _ready(ref: Any) -> Any | None:
    """Return a result if it has arrived; None if not, or if its actor is restarting or its class is not installed."""
    try:
        return ray.get(ref, timeout=0)
    except ActorUnavailableError:
        return None
    except RayActorError:
        raise
    except Exception:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class JobClient:
    """Client that a command uses to call one job's controller (the actor that manages the job)."""

    answers: JobAnswers  # what it had answered when it was looked for
    controller: Any  # handle of its actor

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the controller and return its result."""
        silent, name, begun_s = _silent(), self.answers.actor, time.monotonic()
        left_s = max(_AGAIN_S, silent.get(name, begun_s) + _CALL_TIMEOUT_S - begun_s)
        try:
            answer = call_within(left_s, lambda: getattr(self.controller, method).remote(*arguments, **options))
            silent.pop(name, None)
            return answer
        except (GetTimeoutError, ActorUnavailableError):
            silent.setdefault(name, begun_s)
            later = "" if method in _QUESTIONS else f"; {method} takes effect if it answers again"
            raise click.ClickException(
                f"the controller of job {self.answers.job!r} has not answered within {_CALL_TIMEOUT_S:g} s; "
                f"its node may be overloaded or gone{later}"
            ) from None
        except RayTaskError as error:
            raise click.ClickException(str(error.cause or error)) from None
        except RayActorError:
            raise JobGoneError(self.answers.job) from None

    def status(self) -> JobStatus:
        """Return the job's current status."""
        status: JobStatus = self.ask("status")
        return status

    def events(self, since: int = 0) -> tuple[JobEvent, ...]:
        """Return the job's events in order, skipping the first ``since``."""
        return tuple(self.ask("events", since))

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the job's workers, in rank order."""
        return tuple(self.ask("workers"))

    def wait_for(self, reached: Callable[[JobStatus], bool], timeout_s: float) -> JobStatus | None:
        """Wait until ``reached`` holds for the job's status; return it, the last one if the job ends, None if late."""
        deadline, last = time.monotonic() + timeout_s, self.answers.status
        with contextlib.suppress(JobGoneError):
            while not reached(last := self.status()):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
        return last


class JobGoneError(click.ClickException):
    """Error raised if a job and its controller have ended since the job was found."""

    def __init__(self, job: str) -> None:
        super().__init__(f"job {job!r} has just ended")


def find_jobs(name: str) -> tuple[JobClient, ...]:
    """Return clients for the job called ``name``, or else for all jobs in the submission ``name``; may be empty."""
    answers = known_jobs()
    chosen = [each for each in answers if each.job == name]
    chosen = chosen or [each for each in answers if each.comes_from(name)]
    found = ((each, find_actor(each.actor)) for each in chosen)
    return tuple(JobClient(each, controller) for each, controller in found if controller is not None)


def find_sweeps(name: str, jobs: Sequence[JobClient]) -> list[Any]:
    """Return the actor of the sweep called ``name``, or else of each sweep with trials in ``jobs``.

    Args:
        name: Name of a sweep or a submission. If it is the name of a job, the result is empty.
    """
    if any(each.answers.job == name for each in jobs):
        return []  # one trial is meant
    named = find_actor(f"sweep:{name}")
    trials = (each.answers.spec.trial for each in jobs if each.answers.spec is not None)
    sweeps = {each.sweep for each in trials if each is not None and each.sweep is not None}
    return [named] if named is not None else list(sweeps)


def stop_sweep(sweep: Any, name: str, *, now: bool, reason: str) -> int:
    """Stop a sweep's running trials and start no further ones; return the number of trials that were stopped.

    With ``now``, they stop in the middle of a step. ``name`` (of the sweep or its submission) is for errors, ``reason``
    is shown for each trial.

    Raises:
        ClickException: The sweep's actor does not answer.
    """
    try:
        return int(ray.get(sweep.stop.remote(reason, now), timeout=_CALL_TIMEOUT_S))
    except GetTimeoutError:
        raise click.ClickException(
            f"the actor of sweep {name!r} has not answered within {_CALL_TIMEOUT_S:g} s; the head node may be "
            "overloaded; stop takes effect if it answers again"
        ) from None
    except RayActorError:
        return 0


def find_job(name: str) -> JobClient:
    """Return the job with this name, or the only job of the submission with this name."""
    jobs = find_jobs(name)
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        names = ", ".join(job.answers.job for job in jobs)
        raise click.ClickException(f"submission {name!r} has several jobs: name one of {names}")
    raise not_found(name, [each.job for each in known_jobs()])


def ended_jobs() -> tuple[EndedJobNote, ...]:
    """Return the jobs that ended within the last hour and whose notes are readable: failed ones, then the newest."""
    found: list[EndedJobNote] = []
    for text in notes.ended(time.time()):
        with contextlib.suppress(ValueError):
            found.append(EndedJobNote.from_json(text))
    return tuple(sorted(found, key=lambda each: (each.status.phase is not JobPhase.FAILED, -each.ended_s)))


def ended_job(name: str) -> EndedJobNote | None:
    """Return the note about the most recently ended job with this name or submission; None if no job has ended."""
    same = [each for each in ended_jobs() if name in (each.status.job, each.submission)]
    return max(same, key=lambda each: each.ended_s, default=None)


def not_found(name: str, there: Sequence[str]) -> click.ClickException:
    """Return an error that says how job ``name`` ended or, if it is unknown, which jobs (``there``) are running."""
    if (ended := ended_job(name)) is not None:
        return click.ClickException(f"job {name!r} has ended: {ended.status.phase.value}, {ended.cause}")
    running = f"running: {', '.join(sorted(there))}" if there else "no job runs"
    return click.ClickException(f"there is no job {name!r} ({running}); one that has ended is forgotten after an hour")


def snapshot(timeout_s: float = _CALL_TIMEOUT_S) -> CoreSnapshot | None:
    """Return the allocator's jobs, nodes and decisions; None if no job has started an allocator yet."""
    answer: CoreSnapshot | None = _ask_allocator("snapshot", timeout_s=timeout_s)
    return answer


def snapshot_if_any() -> tuple[CoreSnapshot | None, str]:
    """Return the snapshot, for listings that say less without it, and a message if the allocator does not answer."""
    try:
        return snapshot(_ANSWER_S), ""
    except click.ClickException as error:
        return None, error.message


def views() -> tuple[JobView, ...]:
    """Return the allocator's view of each job that could run, with its planned nodes and its model's measurements.

    Empty if no allocator is running.
    """
    answer: tuple[JobView, ...] | None = _ask_allocator("views")
    return answer or ()


def explain(job: str) -> Explanation | None:
    """Return the allocator's explanation of a job's size; None if the allocator does not know the job."""
    answer: Explanation | None = _ask_allocator("explain", job)
    return answer


def scaling() -> ScalingDecision | None:
    """Return the latest decision about the cluster's size; None if the allocator does not manage nodes."""
    answer: tuple[ScalingDecision | None, Mapping[str, float]] | None = _ask_allocator("scaling")
    return answer[0] if answer is not None else None


def page_address() -> str:
    """Return the address of the allocator's web page; empty if it does not serve one."""
    answer: str | None = _ask_allocator("dashboard")
    return answer or ""


def set_policy(policy: str) -> None:
    """Set the policy that the allocator uses to divide the cluster between all jobs."""
    try:
        make_policy(policy)
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from None
    connect()
    try:
        get_or_create_allocator(policy)
    except PolicyConflictError as error:
        raise click.ClickException(str(error)) from None


def operator_settings(file: str) -> OperatorSettings:
    """Return the operator's settings for the allocator, read from a file."""
    try:
        return OperatorSettings.from_file(file)
    except InputError as error:
        raise click.UsageError(str(error)) from None


def settings_in_force(wanted: OperatorSettings | None = None, *, apply: bool = False) -> Mapping[str, Any]:
    """Return the operator's settings in force or, with ``wanted``, those after applying it, which ``apply`` does."""
    connect()
    return _ask_or_start("apply" if apply else "settings", *([] if wanted is None else [wanted]))


def _ask_or_start(method: str, *arguments: Any) -> Mapping[str, Any]:
    """Call the allocator, starting it if necessary, and return its answer."""
    try:  # it may be being made again
        answer: Mapping[str, Any] = call_within(
            _START_S, lambda: getattr(find_allocator(), method).remote(*arguments), again=RayActorError
        )
        return answer
    except GetTimeoutError:
        raise click.ClickException(f"the allocator has not answered within {_START_S:g} s") from None
    except RayTaskError as error:
        raise click.ClickException(str(error.cause or error)) from None


def _ask_allocator(method: str, *arguments: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any | None:
    """Return the allocator's answer; None if no allocator is running, or it does not know the job."""
    try:
        allocator = find_actor(ALLOCATOR)
        if allocator is None:
            return None
        call = getattr(allocator, method).remote
        return call_within(timeout_s, lambda: call(*arguments))
    except GetTimeoutError:
        raise click.ClickException(
            f"the allocator has not answered within {timeout_s:g} s; the head node may be overloaded"
        ) from None
    except RayTaskError as error:
        if isinstance(error.cause, KeyError):
            return None
        raise click.ClickException(f"the allocator failed: {error.cause or error}") from None
    except (RayActorError, ValueError):  # it is being made again
        return None


def forgive(name: str) -> str:
    """Clear the allocator's record of failures on a node, given by address or id prefix; return the node's id."""
    node = living_node(name, "--forgive")
    if not _ask_allocator("forgive", node):
        raise click.ClickException(f"no worker has failed on node {name}, as far as the allocator knows")
    return node


def living_node(name: str, option: str) -> str:
    """Return the id of the living node with the address ``name``, or whose id starts with ``name``."""
    living = [node for node in ray_nodes() if node["Alive"]] if name else []  # an unset variable names no node
    meant = [n["NodeID"] for n in living if n["NodeID"].startswith(name) or n.get("NodeManagerAddress") == name]
    if len(meant) != 1:
        raise click.ClickException(
            f"{option} must name one living node by its id, the beginning of that, or its address, but {name!r} "
            f"means {len(meant)}; `elastic-ray nodes` lists them"
        )
    return str(meant[0])


def ray_nodes() -> list[dict[str, Any]]:
    """Return all nodes that Ray lists, including dead ones."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def on_every_node(look: Callable[[], Any], node_ids: Sequence[str]) -> Mapping[str, Any]:
    """Call ``look`` on each node; return the results, keyed by node id, with a text in place of each failed result."""
    task: Any = ray.remote(max_calls=1)(look)  # a process that stays would keep the memory that CUDA takes on each GPU
    calls = {
        node_id: task.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote()
        for node_id in node_ids
    }
    deadline = time.monotonic() + _LOOK_S
    answers: dict[str, Any] = {}
    for node_id, call in calls.items():
        try:
            answers[node_id] = ray.get(call, timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError:
            answers[node_id] = f"no answer within {_LOOK_S:g} s"
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            answers[node_id] = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
    return answers
