"""SHELL: one trial as an elastic job: started or found again, read report by report, and stopped.

Both Ray Tune and NNI trials use this module to reach the allocator. The process that holds a :class:`TrialJob` is
light: it imports neither torch nor the user's code, and renews the job's lease from a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import posixpath
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow.fs
import ray
from ray.exceptions import RayActorError, RayError
from ray.train.v2.api.config import ScalingConfig

from elastic_ray.authentication import new_secret
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.config import ElasticConfig, SchedulingConfig
from elastic_ray.driver.handle import JobHandle, find_controller
from elastic_ray.driver.lease import START_TIMEOUT_S
from elastic_ray.driver.trainer import ElasticTrainer, check_resources
from elastic_ray.events import JobStatus, Report, flattened
from elastic_ray.job_spec import JobSpec, TrialSpec
from elastic_ray.worker.train_loop import with_config
from placement.ray_cluster.named_actors import find_actor
from placement.storage.private_files import make_directory, open_whole, replace_file
from placement.storage.storage_calls import call_storage
from placement.text import clipped, printable
from tuning.rung_sizes import Sweep
from tuning.sweep import find_sweep, open_controller, promised
from tuning.trials import Promise, lacks_metric, score_of

logger = logging.getLogger(__name__)

_NAME = r"[A-Za-z0-9._=,+-]{1,128}"
_T = TypeVar("_T")
_NOTE = "elastic_trial.json"
_PAUSED = "paused"
_RUN_NAME = "run"
_RUN = re.compile(r"run_(\d{2,9})")
_STOP_TIMEOUT_S = 5.0
_KEEP_S = 30.0  # for which a trial's processes wait for the next trial; they hold no resources meanwhile
_MOST_SHOWN, _MOST_LETTERS = 50, 40
# Trials come and go: a process that waits for its job to grow would cost each of them a start.
_ELASTIC = ElasticConfig(warm_workers_per_node=0)


class NoCheckpointError(RuntimeError):
    """Error raised if a trial must continue from a checkpoint but has none."""

    def __init__(self, trial: str) -> None:
        super().__init__(
            f"the sweep's scheduler wants trial {trial} to continue from a checkpoint, but the train loop has not "
            "reported any: call elastic_ray.report(metrics, checkpoint=Checkpoint.from_directory(...)) in it, and load "
            "elastic_ray.get_checkpoint() where it begins. PopulationBasedTraining, PB2, HyperBand and BOHB cannot do "
            "without, nor can Ray Tune's CheckpointConfig(checkpoint_frequency=...)"
        )
        self._trial = trial

    def __reduce__(self) -> tuple[Any, ...]:
        return NoCheckpointError, (self._trial,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Settings shared by all trials of a sweep, as checked by :func:`make_template`."""

    spec: JobSpec  # the job of a trial, but for its name, config and places
    promise: Promise | None  # by what trials are compared while they run; None leaves that to the sweep's driver
    reports_ahead: int  # how far training may run ahead of the sweep's decisions
    tenant_weight: float  # weight of the sweep against other jobs
    sweep: str | None  # its name; None leaves that to the driver
    limits: Sweep | None = None  # when it is to end; None for no plan
    metric_else: tuple[str, ...] = ()  # names of what a report without the promise's metric is compared by


def make_template(
    train_loop_or_trainer: Any,
    *,
    train_loop_config: Mapping[str, Any] | None = None,
    scaling_config: ScalingConfig | None = None,
    elastic_config: ElasticConfig | None = None,
    scheduling_config: SchedulingConfig | None = None,
    model_fingerprint: str | None = None,
    weight: float = 1.0,
    promise: Promise | None = None,
    reports_ahead: int = 1,
    sweep: str | Sweep | None = None,
) -> Template:
    """Check the arguments of ``tuning.elastic`` and return them as the settings shared by all trials of a sweep."""
    if promise is not None and not isinstance(promise, Promise):
        raise TypeError(f"promise must be a tuning.Promise or None, but got {promise!r}")
    if isinstance(train_loop_or_trainer, ElasticTrainer):
        given = {
            "train_loop_config": train_loop_config,
            "scaling_config": scaling_config,
            "elastic_config": elastic_config,
            "scheduling_config": scheduling_config,
            "model_fingerprint": model_fingerprint,
        }
        twice = [name for name, value in given.items() if value is not None]
        if twice:
            raise ValueError(f"an ElasticTrainer has its own {', '.join(twice)}; set it there, or pass its train loop")
        trainer = train_loop_or_trainer
    else:
        trainer = ElasticTrainer(
            train_loop_or_trainer,
            train_loop_config=train_loop_config if train_loop_config is not None else {},
            scaling_config=scaling_config,
            elastic_config=elastic_config or _ELASTIC,
            scheduling_config=scheduling_config,
            model_fingerprint=model_fingerprint,
        )
    spec = trainer.spec()
    if spec.datasets:
        raise ValueError(
            "an ElasticTrainer with datasets= cannot be tuned: each trial would need its own reader. Read the "
            "data in the train function, from Parquet files with elastic_ray.data.arrow.ArrowDataset"
        )
    SchedulingConfig(tenant="sweep", tenant_weight=weight)  # checks the weight
    limits, sweep = (sweep, sweep.name) if isinstance(sweep, Sweep) else (None, sweep)
    if sweep is not None and not re.fullmatch(_NAME, sweep):
        raise ValueError(f"sweep must be letters, digits or ._=,+- (it names an actor), but got {sweep!r}")
    return Template(
        spec=spec,
        promise=promise,
        reports_ahead=reports_ahead,
        tenant_weight=weight,
        sweep=sweep,
        limits=limits,
    )


def shown_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a trial to display: at most 50 numbers and strings, each string cut to 40 characters."""
    shown: dict[str, Any] = {}
    for name, value in flattened(config):
        if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            shown[name] = value
        elif isinstance(value, str):
            shown[name] = clipped(value)[:_MOST_LETTERS]
    return dict(list(shown.items())[:_MOST_SHOWN])


class TrialJob:
    """Elastic job that runs one trial. The constructor starts the job, or reconnects to it if it is still running.

    Args:
        sweep: Name of the sweep, used unless the template sets one. The trial's tenant (the owner that receives a share
            from the allocator) is ``"sweep <name>"``, unless ``SchedulingConfig`` names a tenant.
        trial: Id of the trial within the sweep; the job is named ``"<sweep>-<trial>"``.
        start_from: Path of a checkpoint of this or another trial to start from; None starts from scratch.
    """

    def __init__(
        self,
        template: Template,
        *,
        sweep: str,
        trial: str,
        config: Mapping[str, Any],
        directory: str,
        filesystem: pyarrow.fs.FileSystem,
        knowledge_path: str,
        start_from: str | None = None,
    ) -> None:
        self._template = template
        self._sweep = template.sweep or sweep
        self._promise = template.promise
        self._directory, self._filesystem, self._knowledge_path = directory, filesystem, knowledge_path
        self._start_from = start_from
        said = repr(sorted(config.items(), key=lambda item: str(item[0])))
        self._key = hashlib.sha256(said.encode()).hexdigest()
        self.job = f"{sweep}-{trial}"
        self._values: tuple[float, ...] = ()  # of this run
        self._compared = self._warned = False  # whether the promise's metric was among the reports, or missed
        self._taken: int | None = None
        self._run = f"{self._sweep}-{secrets.token_hex(4)}"  # of this job, which may be one of several of the trial
        self._handle = self._find() or self._start(config)

    @property
    def status(self) -> JobStatus:
        """Job status as of the last renewal of its lease (the driver's claim on the job)."""
        return self._handle.last_status

    def next_report(self, timeout: float) -> Report | None:
        """Return the trial's next report; None if none arrives within ``timeout`` [s] or the job is :attr:`done`.

        Each call acknowledges the reports that earlier calls returned. Training blocks in ``report`` when it is
        more than ``reports_ahead`` reports ahead of the last acknowledged one.
        """
        try:
            report = self._handle.next_report(self._taken, timeout)
        except TimeoutError as error:  # whether the controller is gone, the lease finds out
            logger.warning("trial %s: %s", self.job, printable(str(error)))
            return None
        if report is not None:
            self._taken = report.index
            if self._promise is not None:
                self._compare(report, self._promise)
        return report

    @property
    def done(self) -> bool:
        """True if the job has ended and all of its reports have been returned."""
        # An ended job's reports are at hand: no process is asked.
        return self._handle.done() and self._handle.next_report(self._taken, 0.0) is None

    def raise_error(self) -> None:
        """Raise the error that made the job fail; return normally if it did not fail."""
        self._handle.result(timeout=_STOP_TIMEOUT_S)

    def stop(self, *, paused: bool = False) -> None:
        """Stop the job at once and release its workers. Checkpoints from reports that were never read are deleted.

        Args:
            paused: True to record that the trial was paused without a checkpoint. If the sweep resumes the trial,
                NoCheckpointError is then raised, so that the trial does not silently start from scratch.
        """
        if paused:
            self._write_note({**(self._read_note() or {}), _PAUSED: "without a checkpoint"})
        if not self._handle.done():
            with contextlib.suppress(TimeoutError):
                self._handle.stop(now=True)
            if not self._handle.wait(_STOP_TIMEOUT_S):
                logger.warning("trial %s does not answer; its lease ends it", self.job)
                self._handle.leave()
                return
        self._delete_untaken()
        self._send("closed", self._run)

    def _compare(self, report: Report, promise: Promise) -> None:
        """Send the trial's metric values to the sweep."""
        score = score_of(report.metrics, promise.metric, *self._template.metric_else)
        self._values = (*self._values, math.nan if score is None else score)
        if score is not None and not math.isnan(score):
            self._compared = True
        elif score is None and not self._compared and len(self._values) >= promise.patience:
            raise ValueError(f"trial {self.job}, {promise.patience} reports: {lacks_metric(report.metrics, promise)}")
        elif not self._warned:
            self._warned = True
            missing = lacks_metric(report.metrics, promise)
            told = (printable(self.job), report.index, printable(missing))  # in a process whose log is not ours
            logger.warning("trial %s counts as the worst after report %d: %s", *told)
        before = report.index - len(self._values)  # those before the checkpoint that this run started from
        self._send("notify", self.job, before, self._values)

    def _start(self, config: Mapping[str, Any]) -> JobHandle:
        """Start a new job of the trial in a new run directory."""
        template, base = self._template, self._template.spec
        if self._start_from is None and _PAUSED in (self._read_note() or {}):
            raise NoCheckpointError(self.job)
        check_resources(base)
        private = base.elastic.private_files
        last = str((self._read_note() or {}).get(_RUN_NAME, ""))
        storage_path = self._call(
            "making the run's directory", lambda: claim_run(self._filesystem, self._directory, last, private=private)
        )
        scheduling = base.scheduling
        if not scheduling.tenant:
            scheduling = dataclasses.replace(
                scheduling, tenant=f"sweep {self._sweep}", tenant_weight=template.tenant_weight
            )
        spec = dataclasses.replace(
            base,
            job=self.job,
            train_loop=with_config(base.train_loop, config),
            storage_path=storage_path,
            storage_filesystem=self._filesystem,
            max_failures=base.max_failures,
            num_to_keep=None,  # the sweep decides
            secret=new_secret(),  # its own, not the sweep's
            scheduling=scheduling,
            trial=TrialSpec(
                controller=self._run,
                start_from=self._start_from,
                reports_ahead=template.reports_ahead,
                knowledge_path=self._knowledge_path,
                keep_s=_KEEP_S,
                parameters=shown_parameters(config),
            ),
        )
        storage = RunStorage(storage_path, self._filesystem, private=base.elastic.private_files)
        storage.create_within(base.elastic.storage_timeout_s)
        controller, kept = open_controller(self._sweep, template.promise, spec)
        self._promise = template.promise or kept
        self._write_note({"controller": self._run, "key": self._key, _RUN_NAME: posixpath.basename(storage_path)})
        return JobHandle(controller, promised(spec, kept))

    def _find(self) -> JobHandle | None:
        """Return the trial's job if it is still running without a driver and matches the current request; else None."""
        note = self._read_note()
        controller = find_controller(str(note["controller"])) if note else None
        if note is None or controller is None:
            return None
        try:
            spec, status = ray.get([controller.spec.remote(), controller.status.remote()], timeout=START_TIMEOUT_S)
        except (RayActorError, TimeoutError):
            return None
        if spec.job != self.job or spec.trial is None or status.phase.ended:
            return None
        handle = JobHandle(controller, spec)
        start = self._start_from
        own = start is not None and posixpath.dirname(start) == spec.storage_path
        if note["key"] != self._key or not (own or start == spec.trial.start_from):
            handle.stop(now=True)  # the sweep wants something else of the trial
            handle.wait(_STOP_TIMEOUT_S)
            self._send("closed", spec.trial.controller)
            return None
        self._run = spec.trial.controller
        if own and start is not None:
            storage = RunStorage(spec.storage_path, self._filesystem)
            point = self._call("reading where a checkpoint stands", lambda: storage.load_resume_point(start))
            self._taken = point.reports if point is not None else 0
        sweep = find_sweep(self._sweep, self._template.promise)
        with contextlib.suppress(RayError):
            self._promise = self._promise or ray.get(sweep.attached.remote(spec, controller), timeout=START_TIMEOUT_S)
        logger.info("trial %s: its job still runs, and continues", self.job)
        return handle

    def _send(self, method: str, *arguments: Any) -> None:
        """Send the sweep's actor a message, if the actor exists."""
        with contextlib.suppress(RayError, ValueError):
            if (sweep := find_actor(f"sweep:{self._sweep}")) is not None:
                getattr(sweep, method).remote(*arguments)

    def _write_note(self, note: Mapping[str, str]) -> None:
        def write() -> None:
            path, private = posixpath.join(self._directory, _NOTE), self._template.spec.elastic.private_files
            replace_file(self._filesystem, path, json.dumps(note).encode(), private=private)

        self._call("writing the trial's note", write)

    def _read_note(self) -> Mapping[str, str] | None:
        """Return the note, with at least ``controller`` and ``key``; None if it is missing or unreadable."""

        def read() -> Any:
            with open_whole(self._filesystem, posixpath.join(self._directory, _NOTE)) as stream:
                return json.loads(stream.readall())

        try:
            note = self._call("reading the trial's note", read)
        except (OSError, ValueError):
            return None
        return note if isinstance(note, dict) and {"controller", "key"} <= note.keys() else None

    def _delete_untaken(self) -> None:
        """Delete the checkpoints from reports that the sweep never received."""
        begun = time.monotonic()
        storage = RunStorage(self._handle.storage_path, self._filesystem)
        after = self._taken
        while time.monotonic() < begun + _STOP_TIMEOUT_S and (report := self._handle.next_report(after, 0.0)):
            after = report.index
            if (path := report.checkpoint) is not None:
                self._call(f"deleting {path}", functools.partial(storage.delete_checkpoint, path))

    def _call(self, what: str, function: Callable[[], _T]) -> _T:
        """Call storage; raise ``StorageTimeoutError`` if it does not answer."""
        timeout_s = self._template.spec.elastic.storage_timeout_s
        return call_storage(self._directory, what, function, timeout_s=timeout_s)


def claim_run(filesystem: pyarrow.fs.FileSystem, directory: str, last: str, *, private: bool) -> str:
    """Return the path of a new directory for one start (run) of a trial, so that runs never overwrite each other.

    The directory's number is higher than any existing run's and the last run's, even if the last run was deleted. On a
    local file system, the directory is created at once, so that two concurrent callers get different directories.
    """
    entries = filesystem.get_file_info(pyarrow.fs.FileSelector(directory, allow_not_found=True))
    numbers = [int(each[1]) for name in [last, *(e.base_name for e in entries)] if (each := _RUN.fullmatch(name))]
    for number in itertools.count(max(numbers, default=-1) + 1):
        path = posixpath.join(directory, f"run_{number:02d}")
        if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            break
        make_directory(filesystem, directory, private=private)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700 if private else 0o777)
            break
    return path
