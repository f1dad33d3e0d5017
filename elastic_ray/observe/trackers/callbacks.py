"""SHELL: callbacks of Ray Train and Ray Tune, used as trackers of a run."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow.fs
import ray.cloudpickle

from elastic_ray.checkpoints.copying import copy_directory
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import JobEvent, JobPhase, Report
from elastic_ray.observe.trackers.series import JobNumbers, SeenReports, is_change_of_size
from elastic_ray.sealed import Raised
from placement.storage.private_files import make_directory, make_own

# Other names by which loggers know a trial's fields: a job is its own experiment, with one trial.
_SAME = {
    "logdir": "local_path",
    "local_experiment_path": "local_path",
    "experiment_dir_name": "trial_name",
    "trainable_name": "trial_name",
    "experiment_tag": "trial_id",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialView:
    """Read-only view of a job with the same attributes as a ``ray.tune`` trial, for loggers.

    Views with the same ``trial_id`` compare equal, because loggers use them as dictionary keys.

    Attributes:
        trial_id: Id of the run. It stays the same when the controller is replaced.
        local_path: Directory on the controller's node in which loggers may write.
        node_ip: Address of the controller's node; empty if Ray is not initialised.
        status: The run's status in Ray Tune's terms: "RUNNING", "TERMINATED" or "ERROR".
    """

    trial_id: str
    trial_name: str
    config: Mapping[str, Any]
    local_path: str
    path: str
    node_ip: str = ""
    checkpoint: Any = None
    status: str = "RUNNING"

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return getattr(self, _SAME[name])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def local_dir(self) -> str:
        """Parent directory of ``local_path``."""
        return os.path.dirname(self.local_path)

    @property
    def evaluated_params(self) -> dict[str, Any]:
        """Sampled hyperparameters: always empty, because a job samples none."""
        return {}

    def init_local_path(self) -> None:
        """Create the directory ``local_path``."""
        os.makedirs(self.local_path, exist_ok=True)

    def get_ray_actor_ip(self) -> str:
        """Return the address of the controller's node."""
        return self.node_ip

    def __hash__(self) -> int:
        return hash(self.trial_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrialView) and other.trial_id == self.trial_id

    def __str__(self) -> str:
        return self.trial_name


FOLDER = "trackers"
logger = logging.getLogger(__name__)
_MOST_STATE = 1 << 16  # characters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Description of a run that trackers need to call the user's callbacks."""

    job: str  # its name
    run_id: str  # the same for the whole run, whatever controllers it has
    storage: RunStorage
    is_trial: bool  # Ray Tune calls its own loggers


class Callbacks:
    """Callbacks of a run, which are unpickled by the first thread that needs any of them."""

    def __init__(self, packed: bytes, run_id: str) -> None:
        self._packed, self._run_id = packed, run_id
        self._lock = threading.Lock()
        self._unpacked: tuple[tuple[Any, ...], RunContext] | None = None

    def get(self, index: int) -> tuple[Any, RunContext]:
        """Return the callback at ``index`` and the run's context. Raises any error from unpickling the callbacks."""
        with self._lock:
            if self._unpacked is None:
                self._unpacked = unpack_callbacks(self._packed, self._run_id)
        return self._unpacked[0][index], self._unpacked[1]


class CallbackTracker:
    """Tracker that passes a run's reports (each once, though the run may repeat it) and events to one user callback."""

    def __init__(self, callbacks: Callbacks, index: int, run: TrackedRun) -> None:
        self._callbacks, self._index, self._run = callbacks, index, run
        self._note: dict[str, Any] = {}
        self._seen = SeenReports()
        self._target: _UserCallback | _LoggerCallback | None = None
        self._numbers: Mapping[str, float] = {}
        self.note = ""  # what the tracker of a controller after this one has to know; empty for nothing

    def recall(self, note: str) -> None:
        """Restore ``note``, the state left by an earlier controller's tracker; must be the first method called."""
        if note:
            self._note = json.loads(note)
            self._seen = SeenReports(int(self._note.get("told", 0)))
            self.note = note

    def start(self, step: int, reports: int, *, again: bool, events: tuple[JobEvent, ...]) -> None:
        """Unpickle the callback and notify it that the run is starting; for arguments, see :meth:`Tracker.start`."""
        callback, context = self._callbacks.get(self._index)
        if not again:
            self._seen = SeenReports(reports)
        target = _target(callback, context, self._run)
        if target is not None and not self._note.get("ended"):
            for number in target.start(self._note.get("state")):
                self._seen.add(number)
            self._target = target
        self._keep()

    def report(self, report: Report, time_s: float) -> None:
        """Pass a report to the callback, unless the callback has already received it."""
        if self._target is not None and self._seen.add(report.index):
            try:
                self._target.report(report, time_s, self._numbers)
            finally:
                self._keep()

    def numbers(self, numbers: JobNumbers) -> None:
        """Store the job's numbers, to be passed on with the next report."""
        self._numbers = numbers.values

    def event(self, event: JobEvent) -> None:
        """Pass an event for the job to the callback, if the event changes the job's size."""
        if self._target is not None:
            self._target.event(event)

    def failed(self, errors: Mapping[int, Exception]) -> None:
        """Report the errors of failed workers, keyed by rank, to the callback."""
        if self._target is not None:
            self._target.failed(errors)

    def raised(self, error: Raised) -> None:
        """Report an error in the train function to the callback, without unpickling the original exception."""
        from elastic_ray.errors import TrainFunctionError  # imports ray.train

        self.failed({error.rank: TrainFunctionError(error.traceback_text, error.rank, error.node)})

    def flush(self) -> None:
        """Do nothing, because this tracker buffers no calls."""

    def finish(self, phase: JobPhase) -> None:
        """Notify the callback that the run has ended, successfully or not according to ``phase``."""
        target, self._target = self._target, None
        if target is not None:
            try:
                target.finish(phase)
            finally:
                self._note["ended"] = True
                self._keep()

    def _keep(self) -> None:
        self._note["told"] = self._seen.last
        if self._target is not None and (state := self._target.state()) is not None:
            self._note["state"] = state
        self.note = json.dumps(self._note)


def _target(callback: Any, context: RunContext, run: TrackedRun) -> _UserCallback | _LoggerCallback | None:
    """Return an adapter that calls the callback; None for a logger that Ray Tune calls itself."""
    from ray.tune.logger import LoggerCallback

    if not isinstance(callback, LoggerCallback):
        return _UserCallback(callback, context, run)
    return None if run.is_trial else _LoggerCallback(callback, context, run)


class _UserCallback:
    """Adapter for a ``ray.train.UserCallback``, which may also define ``on_resize(run_context, event)``."""

    def __init__(self, callback: Any, context: RunContext, run: TrackedRun) -> None:
        self._callback, self._context, self._run = callback, context, run

    def start(self, state: str | None) -> frozenset[int]:
        """Restore the callback's state, if any; a ``UserCallback`` has no method for a run's start."""
        if state is not None:
            go_on(self._callback, None, state)
        return frozenset()

    def report(self, report: Report, time_s: float, numbers: Mapping[str, float]) -> None:
        """Call ``after_report`` with rank 0's metrics, which represent all ranks."""
        checkpoint = _checkpoint(report, self._run.storage)
        self._callback.after_report(self._context, [copy.deepcopy(dict(report.metrics))], checkpoint)

    def event(self, event: JobEvent) -> None:
        """Call ``on_resize`` if the callback defines it and the event changes the job's size."""
        on_resize: Callable[..., None] | None = getattr(self._callback, "on_resize", None)
        if on_resize is not None and is_change_of_size(event):
            on_resize(self._context, dataclasses.replace(event, detail=copy.deepcopy(dict(event.detail))))

    def failed(self, errors: Mapping[int, Exception]) -> None:
        """Call ``after_exception``, as Ray Train does."""
        self._callback.after_exception(self._context, dict(errors))

    def finish(self, phase: JobPhase) -> None:
        """Do nothing, because a ``UserCallback`` has no method for a run's end."""

    def state(self) -> str | None:
        """Return the state of a callback that has ``get_state`` and ``set_state``; None for other callbacks."""
        return state_of(self._callback, None)


class _LoggerCallback:
    """Adapter for a ``ray.tune`` logger, which sees the job as an experiment's only trial."""

    def __init__(self, callback: Any, context: RunContext, run: TrackedRun) -> None:
        self._callback, self._run = callback, run
        self._begun_s = time.time()
        self._reports = 0
        self._trial = TrialView(
            trial_id=run.run_id,
            trial_name=run.job,
            config=context.train_loop_config or {},
            local_path=folder_of(run),
            path=run.storage.path,
            node_ip=_address(),
        )

    def start(self, state: str | None) -> frozenset[int]:
        """Set up the logger and start the trial, in Ray Tune's order of calls."""
        if _is(self._callback, "WandbLoggerCallback"):
            self._callback.kwargs.setdefault("resume", "allow")
        self._callback.setup(experiment_path=self._trial.local_path)
        if state is not None:
            go_on(self._callback, self._trial, state)
        self._callback.on_trial_start(0, [self._trial], self._trial)
        return known_reports(self._callback, self._trial) if state is not None else frozenset()

    def report(self, report: Report, time_s: float, numbers: Mapping[str, float]) -> None:
        """Log the reported metrics, extended by the entries that Ray Tune adds to a result."""
        self._reports = report.index
        if report.checkpoint is not None:
            self._trial = dataclasses.replace(self._trial, checkpoint=_checkpoint(report, self._run.storage))
        result = {
            **copy.deepcopy(dict(report.metrics)),
            "elastic": {**numbers, "workers": report.workers, "step": report.steps},
            "training_iteration": report.index,
            "trial_id": self._trial.trial_id,
            "experiment_tag": self._trial.experiment_tag,
            "date": time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(time_s)),
            "timestamp": int(time_s),
            "time_total_s": time_s - self._begun_s,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "node_ip": self._trial.node_ip,
            "config": dict(self._trial.config),
            "done": False,
        }
        self._callback.on_trial_result(report.index, [self._trial], self._trial, result)
        if report.checkpoint is not None:
            self._callback.on_trial_save(report.index, [self._trial], self._trial)

    def event(self, event: JobEvent) -> None:
        """Do nothing, because a logger has no method for events."""

    def failed(self, errors: Mapping[int, Exception]) -> None:
        """Do nothing, because a logger is notified of a failure when the run ends."""

    def finish(self, phase: JobPhase) -> None:
        """End the trial and the experiment, then copy the logger's files to the run's storage."""
        failed = phase is JobPhase.FAILED
        self._trial = dataclasses.replace(self._trial, status="ERROR" if failed else "TERMINATED")
        ended = self._callback.on_trial_error if failed else self._callback.on_trial_complete
        try:
            ended(self._reports, [self._trial], self._trial)
        finally:
            self._callback.on_experiment_end(trials=[self._trial])
            storage = self._run.storage
            if not storage.local and os.listdir(self._trial.local_path):
                target, local = f"{storage.path}/{FOLDER}", pyarrow.fs.LocalFileSystem()
                copy_directory(local, self._trial.local_path, storage, target)

    def state(self) -> str | None:
        """Return the state that the logger needs to resume the same run; None if it has none."""
        return state_of(self._callback, self._trial)


def folder_of(run: TrackedRun) -> str:
    """Create and return the loggers' directory: in local storage or, if storage is remote, a temporary directory."""
    storage = run.storage
    if storage.local:
        path = os.path.join(storage.path, FOLDER)
        make_directory(pyarrow.fs.LocalFileSystem(), path, private=storage.private)
        return path
    shared = tempfile.gettempdir()  # a controller after this one finds it again
    path = os.path.join(shared, f"elastic_ray_{os.geteuid()}", run.run_id, FOLDER)
    try:
        make_own(path, shared)
    except OSError as error:
        path = tempfile.mkdtemp(prefix="elastic_ray_")
        logger.warning("loggers' files are in %s until they are copied: %s", path, error)
    return path


def _checkpoint(report: Report, storage: RunStorage) -> Any:
    """Return the report's ``ray.train.Checkpoint``; None if the report has none."""
    if report.checkpoint is None:
        return None
    from ray.train import Checkpoint

    return Checkpoint(report.checkpoint, storage.filesystem)


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else ""  # type: ignore[no-untyped-call]


# A logger that has `get_state` and `set_state` (Ray Tune's protocol) says so itself, as far as JSON can carry its
# state: what another process has written down is never unpickled. Ray's own for MLflow and Weights & Biases have
# neither: of the first, the run id is put back where it keeps it; the second gets `resume="allow"`, which its
# constructor takes for `wandb.init`. Others (Comet, Aim) begin another run.
def go_on(logger: Any, trial: TrialView | None, state: str) -> None:
    """Resume a logger's run from ``state``, returned by :func:`state_of`; call this after the logger's ``setup``."""
    kind, _, value = state.partition(":")
    if kind == "mlflow" and isinstance(getattr(logger, "_trial_runs", None), dict):
        logger._trial_runs[trial] = value
    elif kind == "own" and hasattr(logger, "set_state"):
        logger.set_state(json.loads(value))


def state_of(logger: Any, trial: TrialView | None) -> str | None:
    """Return the state that a logger needs to resume its run; None if it is missing, too large or not JSON."""
    runs = getattr(logger, "_trial_runs", None)
    if _is(logger, "MLflowLoggerCallback") and isinstance(runs, dict) and trial in runs:
        return f"mlflow:{runs[trial]}"
    get_state = getattr(logger, "get_state", None)
    state = get_state() if get_state is not None else None
    if state is None:
        return None
    try:
        text = f"own:{json.dumps(state)}"
    except (TypeError, ValueError, RecursionError):  # no JSON
        return None
    return text if len(text) <= _MOST_STATE else None


def known_reports(logger: Any, trial: TrialView) -> frozenset[int]:
    """Return the indices of the reports that a logger's MLflow run already has; empty for other loggers.

    They are needed because a process may die after logging a report and before the tracker's note records this.
    """
    runs = getattr(logger, "_trial_runs", None)
    if not _is(logger, "MLflowLoggerCallback") or not isinstance(runs, dict) or trial not in runs:
        return frozenset()
    points = logger.mlflow_util._get_client().get_metric_history(runs[trial], "training_iteration")
    return frozenset(int(point.step) for point in points)


def _is(logger: Any, *names: str) -> bool:
    """True if the logger's class, or one of its bases, has one of these names; the module need not be installed."""
    return any(each.__name__ in names for each in type(logger).__mro__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Description of a run, in the terms of Ray Train, that callbacks receive as ``run_context``."""

    run_id: str  # the same for the whole run
    run_config: Any  # the user's
    train_loop_config: Mapping[str, Any] | None  # the user's
    scaling_config: Any  # the user's

    def get_run_config(self) -> Any:
        """Return the ``RunConfig`` that the user passed to the trainer."""
        return self.run_config


def pack_callbacks(
    callbacks: Sequence[Any], *, run_config: Any, train_loop_config: Mapping[str, Any] | None, scaling_config: Any
) -> bytes:
    """Return the callbacks pickled by value, like the train function; empty if no callbacks are given."""
    if not callbacks:
        return b""
    for callback in callbacks:
        try:
            ray.cloudpickle.dumps(callback)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise TypeError(
                f"callback {type(callback).__name__} of RunConfig(callbacks) cannot be sent to the job's controller, "
                f"where it is called: {error}; open files and connections in its methods, not in its constructor"
            ) from error
    settings = (dict(train_loop_config) if train_loop_config is not None else None, run_config, scaling_config)
    return bytes(ray.cloudpickle.dumps((tuple(callbacks), *settings)))  # type: ignore[no-untyped-call]


def unpack_callbacks(packed: bytes, run_id: str) -> tuple[tuple[Any, ...], RunContext]:
    """Return the callbacks in ``packed``, the result of :func:`pack_callbacks`, and the context of run ``run_id``.

    Unpickling runs user code, so call this only in a thread that nothing waits for.

    Raises any error from the user's code; for example, a module may be missing on the controller's node.
    """
    callbacks, train_loop_config, run_config, scaling_config = pickle.loads(packed)
    context = RunContext(
        run_id=run_id, run_config=run_config, train_loop_config=train_loop_config, scaling_config=scaling_config
    )
    return callbacks, context
