"""SHELL: branches of a running job: separate jobs that start from the same checkpoint and run one after another."""

from __future__ import annotations

import contextlib
import dataclasses
import posixpath
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from elastic_ray.adaptation.policies.branch_batch import BranchBatch
from elastic_ray.authentication import new_secret
from elastic_ray.batch.branch_losses import BranchError, BranchPlan, BranchResult, compare
from elastic_ray.checkpoints.automatic import StateFile, copy_state, state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import JobPhase, JobStatus, Report, number_in
from elastic_ray.job_spec import JobSpec
from elastic_ray.worker.stored_train_loop import stored_train_loop
from elastic_ray.worker.train_loop import with_policies
from placement.cluster.cluster import TOLERANCE

_LOWEST_WEIGHT = 1e-3
_LOWEST_PRIORITY = -1_000_000
_LEASE_S = 20.0  # without the controller that runs them branches end soon
_POLL_S = 0.2
_ANSWER_S = 60.0
_END_S = 30.0
_MARK = ".branch"  # file in the directories of branches
_MORE = 2  # steps until a branch has its batch
_TRIES = 3  # to copy a checkpoint, which the job may delete for a newer one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BranchRun:
    """Comparison of branches (copies of one job that train at different batches).

    Attributes:
        sizes: Batches to compare, the current one first [samples].
        idle: If True, branches only use slots that no other job can use.
        waits_s: Maximum duration of a branch [s].
    """

    spec: JobSpec
    sizes: tuple[int, ...]
    plan: BranchPlan
    idle: bool
    waits_s: float

    def measure(self, start: Callable[[JobSpec], Any]) -> BranchResult:
        """Run the branches one after the other, each submitted by ``start``; return the comparison of their losses.

        Raises BranchError if no checkpoint exists yet, a branch failed, or the losses are inconclusive, and OSError if
        storage cannot be used.
        """
        samples = self.plan.steps * self.sizes[0]
        branches = [self._branch(size, samples) for size in self.sizes]
        try:
            state = self._copy_newest(branches)
            curves = {
                each.size: each.run(start, self.plan.metric, state.steps, samples, self.waits_s) for each in branches
            }
        finally:
            for each in branches:
                each.remove()
        return compare(self.plan, state.steps, samples, curves)

    def _copy_newest(self, branches: list[Branch]) -> StateFile:
        """Copy the job's newest automatic checkpoint to each branch, before the job replaces it."""
        source = RunStorage(
            self.spec.storage_path, self.spec.storage_filesystem, private=self.spec.elastic.private_files
        )
        for last in range(_TRIES - 1, -1, -1):
            states = state_files(source)
            if not states:
                raise BranchError(
                    f"job {self.spec.job!r} has no automatic checkpoint yet, from which branches start; wait for its "
                    "first one (a smaller ElasticConfig(checkpoint_interval_s=...) brings it sooner)"
                )
            try:
                for each in branches:
                    each.remove()
                    each.create()
                    copy_state(source, states[0], each.storage)
                return states[0]
            except FileNotFoundError:
                if not last:
                    raise
        raise AssertionError("the last try returns or raises")

    def _branch(self, size: int, samples: int) -> Branch:
        """Return the branch that trains at batch ``size``."""
        spec = self.spec
        packed = spec.train_loop
        if spec.stored_train_loop:
            packed, _ = stored_train_loop(spec.stored_train_loop)
        name = f"{spec.job}-branch-{size}"
        scheduling = dataclasses.replace(
            spec.scheduling,
            weight=_LOWEST_WEIGHT,
            priority=_LOWEST_PRIORITY if self.idle else spec.scheduling.priority,
            preemptible=True,
            deadline_s=None,
            budget_usd=None,
        )
        elastic = dataclasses.replace(
            spec.elastic,
            lease_s=max(_LEASE_S, 2 * spec.elastic.report_interval_s),
            keep_last_state=False,
            branch_when_idle=False,
            tensorboard=False,
            webhook=None,
            faults=None,
        )
        return Branch(
            size=size,
            spec=dataclasses.replace(
                spec,
                job=name,
                branch_of=spec.job,
                storage_path=posixpath.join(posixpath.dirname(spec.storage_path), name),
                train_loop=with_policies(packed, [BranchBatch(size, samples)]),
                stored_train_loop="",
                callbacks=b"",
                callback_names=(),
                secret=new_secret(),
                shown=False,
                scheduling=scheduling,
                elastic=elastic,
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Branch of a job: a copy that trains at batch size ``size``, to be compared with other branches."""

    size: int  # its batch
    spec: JobSpec

    @property
    def storage(self) -> RunStorage:
        """Directory of the branch's run, next to the job's."""
        return RunStorage(self.spec.storage_path, self.spec.storage_filesystem, private=self.spec.elastic.private_files)

    def create(self) -> None:
        """Create the directory and the marker file that :meth:`remove` requires. Raises OSError if writing fails."""
        self.storage.create()
        self.storage.filesystem.open_output_stream(self._mark).close()

    def remove(self) -> None:
        """Delete the branch's directory. Raises BranchError if it has no marker file, as it may belong to the user."""
        path, filesystem = self.storage.path, self.storage.filesystem
        if filesystem.get_file_info(path).type.name == "NotFound":
            return
        if not filesystem.get_file_info(self._mark).is_file:
            raise BranchError(f"{path} is needed for a branch, but holds what no branch has written; move it away")
        filesystem.delete_dir(path)

    @property
    def _mark(self) -> str:
        return posixpath.join(self.storage.path, _MARK)

    def run(
        self, start: Callable[[JobSpec], Any], metric: str, first: int, samples: int, timeout_s: float
    ) -> list[tuple[float, float]]:
        """Train the branch on ``samples`` samples; return pairs (samples since step ``first``, value of ``metric``).

        Raises BranchError if the branch fails, or has not ended within ``timeout_s`` [s].
        """
        try:
            controller = start(self.spec)
        except ValueError as error:
            raise BranchError(
                f"job {self.spec.job!r} is already running: wait for its end, or stop it ({error})"
            ) from error
        reports: list[Report] = []
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                status: JobStatus = ray.get(controller.renew_lease.remote(), timeout=_ANSWER_S)
                while (report := self._next(controller, reports)) is not None:
                    reports.append(report)
                through = bool(reports) and (reports[-1].steps - first - _MORE) * self.size >= samples
                if through or status.phase in (JobPhase.PAUSED, JobPhase.FINISHED):
                    break
                if status.phase.ended:
                    raise BranchError(f"job {self.spec.job!r} {status.phase.value}: {status.message}")
                if time.monotonic() > deadline_s:
                    raise BranchError(
                        f"job {self.spec.job!r} has not ended within {timeout_s:g} s ({status.phase.value})"
                    )
                time.sleep(_POLL_S)
        except RayActorError as error:
            raise BranchError(f"the controller of job {self.spec.job!r} is gone: {error}") from error
        finally:
            self._end(controller)
        found = [(each.steps, number_in(each.metrics, metric)) for each in reports]
        return [(float((steps - first) * self.size), loss) for steps, loss in found if loss is not None]

    def _next(self, controller: Any, reports: list[Report]) -> Report | None:
        after = reports[-1].index if reports else None
        found: Report | None = ray.get(controller.next_report.remote(after, 0.0), timeout=_ANSWER_S)
        return found

    def _end(self, controller: Any) -> None:
        """Stop the branch's job and discard its outcome."""
        with contextlib.suppress(Exception):  # its lease ends it otherwise
            ray.get(controller.stop.remote(now=True, reason="the branch is over"), timeout=_ANSWER_S)
            deadline_s = time.monotonic() + _END_S
            while ray.get(controller.outcome.remote(), timeout=_ANSWER_S) is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            controller.close.remote()


def slots_are_idle(spec: JobSpec) -> bool:
    """True if free resources suffice for the job's minimum size. Raises RuntimeError if Ray does not answer."""
    try:
        free = ray.available_resources()  # type: ignore[no-untyped-call]
    except RayError as error:
        raise RuntimeError(f"free resources are not known: {error}") from error
    return all(free.get(name, 0.0) + TOLERANCE >= amount * spec.min_workers for name, amount in spec.bundle.items())
