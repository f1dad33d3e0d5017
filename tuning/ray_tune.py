"""SHELL: Ray Tune trials as elastic jobs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import logging
import math
import os
import posixpath
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray import tune
from ray.train import Checkpoint
from ray.train._internal.session import _TrainingResult
from ray.train._internal.storage import StorageContext
from ray.train.v2.api.config import ScalingConfig
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.execution.tune_controller import TuneController
from ray.tune.result import RESULT_DUPLICATE, SHOULD_CHECKPOINT
from ray.tune.schedulers import AsyncHyperBandScheduler, HyperBandScheduler, MedianStoppingRule

from elastic_ray.checkpoints.run_directory import SUBMISSION_FILE, RunStorage
from elastic_ray.config import ElasticConfig, SchedulingConfig
from elastic_ray.driver.other_clusters import refuse_running_elsewhere
from elastic_ray.driver.overrides import login_name, read_overrides
from elastic_ray.driver.trainer import kept_submission
from elastic_ray.events import JobPhase
from elastic_ray.late_patch import patched
from elastic_ray.record.submitted import SubmittedJob
from elastic_ray.record.writer import ALIVE_EVERY_S
from elastic_ray.worker.train_loop import PickledTrainLoop, pack, with_config
from placement.ray_cluster.snapshot import on_head
from placement.text import printable
from tuning.rung_sizes import Sweep
from tuning.sweep import (
    StopWatch,
    SweepDriver,
    SweepStoppedError,
    claim_sweep,
    release_sweep,
    sweep_runs,
    this_driver,
)
from tuning.trial_job import NoCheckpointError, Template, TrialJob, make_template
from tuning.trials import Promise, check_searchable

_HOME = "ray.train._internal.session"


def in_tune(packed: bytes) -> bytes:
    """Return the pickled train loop ``packed``, changed so that Ray Tune's ``report`` and ``get_checkpoint`` work."""
    return pack(_InTune(packed), {})


class _InTune(PickledTrainLoop):
    def __call__(self, config: Mapping[str, Any]) -> Any:
        with patched(_HOME, "_session", _Session()):
            return super().__call__(config)


class _Session:
    """Session used by ``ray.tune``'s functions; without one, they would warn once and lose every report."""

    world_rank = None  # by this Ray knows a session of Tune from one of Ray Train

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, **_: Any) -> None:
        import elastic_ray

        elastic_ray.report(metrics, checkpoint)

    @property
    def loaded_checkpoint(self) -> Any:
        import elastic_ray

        return elastic_ray.get_checkpoint()

    @property
    def trial_id(self) -> str:
        return self._names()[1]

    @property
    def experiment_name(self) -> str:
        return self._names()[0]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the workers of an elastic trial do not know Ray's {name!r}; elastic_ray.get_context() knows rank, size "
            "and job, the train loop's config the trial's parameters"
        )

    @staticmethod
    def _names() -> tuple[str, str]:
        import elastic_ray

        experiment, _, trial = elastic_ray.get_context().get_job_name().rpartition("-")
        return experiment, trial


logger = logging.getLogger(__name__)

# The trial itself only waits, and Tune refuses a trial that holds nothing. How many run at a time is
# TuneConfig(max_concurrent_trials). A thousandth of a CPU would take a whole one from workers that need whole ones.
_WITHOUT_HEAD = {"CPU": 0.001}
_REPORTS = "training_iteration"
_FRESH_NAME = re.compile(r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d$")  # Tune's own, with the second when it was made
_WAIT_S = 5.0
_LOOK_S = 0.5
_STARTING = max(1, (os.cpu_count() or 1) // 2)  # trials whose own processes start at a time; their workers do beside
_HELD_S = 3.0  # Tune's loop learns within this time that the sweep was stopped, and starts no other trial meanwhile


def elastic(
    train_loop_or_trainer: Any,
    *,
    train_loop_config: Mapping[str, Any] | None = None,
    scaling_config: ScalingConfig | None = None,
    elastic_config: ElasticConfig | None = None,
    scheduling_config: SchedulingConfig | None = None,
    model_fingerprint: str | None = None,
    weight: float = 1.0,
    promise: Promise | None = None,
    sweep: str | Sweep | None = None,
) -> type[Trainable]:
    """Return a trainable for ``ray.tune.Tuner`` that runs trials as elastic jobs.

    The cluster's allocator decides how many workers each trial has.

    In ``Tuner(tuning.elastic(train, scaling_config=ScalingConfig(num_workers=(1, 8))), param_space={"lr": ...})``, the
    train loop ``train`` gets the trial's parameters in its config. Its reports, made with ``elastic_ray.report(metrics,
    checkpoint)`` or ``ray.tune.report``, are the trial's results. If a learning rate is among the parameters, it
    applies to the loader's initial batch size and is scaled from there when the batch grows. The initial batch size may
    itself be a parameter.

    The trial's own process is a light driver on the head node that reserves neither CPU nor GPU, so
    ``TuneConfig(max_concurrent_trials)`` sets how many trials run at the same time. ``num_workers`` cannot be searched,
    because sizes change while a trial is running.

    Args:
        train_loop_or_trainer: A train loop, or an ``ElasticTrainer`` whose settings apply to all trials (its
            ``RunConfig`` determines failure handling and the workers' environment; Tune sets names and directories).
        train_loop_config: Config shared by all trials; a trial's parameters override it.
        scaling_config: Workers per trial, ``num_workers=(min, max)``, and the resources of each worker.
        elastic_config: As for ``ElasticTrainer``, except that ``warm_workers_per_node`` defaults to 0.
        scheduling_config: As for ``ElasticTrainer``. If it names no tenant (the owner that receives a share of the
            cluster from the allocator), the sweep gets its own tenant, ``"sweep <name>"``.
        model_fingerprint: Name of the model; trials with the same name share speed measurements. Set it only if no
            parameter changes the model's speed. By default, trials with the same architecture share measurements.
        weight: Weight of the sweep relative to other jobs; ``AllocatorConfig.tenants`` overrides it.
        promise: Rule for comparing running trials, so that the best get more workers (see ``Promise``). None derives
            the rule from Tune's scheduler (ASHA, HyperBand, and median stopping by reports). Without such a scheduler,
            workers are assigned by speed alone.
        sweep: Name of the sweep; by default the name of the Tune experiment. ``fit()`` raises ``SweepRunsError`` while
            another sweep with this name is running. If a sweep with this name ended only seconds ago, its processes are
            reused. Pass a ``tuning.Sweep`` to set a deadline or a budget as well.

    Returns:
        A class trainable with ``reset_config`` (``TuneConfig(reuse_actors=True)``).

    Raises:
        TypeError, ValueError: As for ``ElasticTrainer``.
    """
    template = make_template(
        train_loop_or_trainer,
        train_loop_config=train_loop_config,
        scaling_config=scaling_config,
        elastic_config=elastic_config,
        scheduling_config=scheduling_config,
        model_fingerprint=model_fingerprint,
        weight=weight,
        promise=promise,
        reports_ahead=0,
        sweep=sweep,
    )
    spec = dataclasses.replace(template.spec, train_loop=in_tune(template.spec.train_loop))
    template = dataclasses.replace(template, spec=spec)
    _claim_sweeps()
    _resume_sweeps()
    name = getattr(train_loop_or_trainer, "__name__", "trial")
    return type(f"elastic_{name}", (ElasticTrainable,), {"_template": template})


class _WhereItIs(Checkpoint):
    """Checkpoint that Ray's ``restore`` does not download; the workers read it themselves."""

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the checkpoint's path without downloading the checkpoint."""
        yield self.path


class ElasticTrainable(Trainable):
    """Trainable that runs in a trial's own process and drives the trial's elastic job; made by :func:`elastic`."""

    _template: Template

    def __init_subclass__(cls) -> None:
        """Raise ValueError for a subclass made by ``tune.with_resources``, which is not supported."""
        if "default_resource_request" in vars(cls):
            raise ValueError(
                "an elastic trainable asks for no resources of its own: leave tune.with_resources out, say what a "
                "worker needs in ScalingConfig(resources_per_worker) and how many trials run at a time in "
                "TuneConfig(max_concurrent_trials)"
            )

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        """Return the resources for the process that Tune starts for a trial: almost none, on the head node."""
        _check_space(config)
        _notify_kept_actors()
        _end_stopped_sweeps()
        _claim_sweeps()
        on = on_head() if ray.is_initialized() else {}
        if on:
            from placement.allocator.actor import find_allocator  # the trials' own processes do without

            find_allocator()  # it starts while trials do, which will need it
        return PlacementGroupFactory([on.get("resources", _WITHOUT_HEAD)])

    def setup(self, config: dict[str, Any], **constants: Any) -> None:
        """Set up the trial for Tune, with the parameters ``config``.

        The job starts only at the first step, when the checkpoint to start from is known.
        """
        _check_space({**constants, **config})
        self._parameters = dict(config)
        self._constants = constants
        self._start_from: str | None = None
        self._job: TrialJob | None = None
        self._reported: str | None = None  # checkpoint of the last report
        self._saved: Any = None
        self._asked_in_vain = 0  # how often Tune wanted a checkpoint before there was any
        self._asked_last = False

    def step(self) -> dict[str, Any]:
        """Return the train loop's next report, with ``workers`` added (their number); the first call starts the job."""
        if self._job is None:
            try:
                self._job = self._start()
            except SweepStoppedError:
                time.sleep(_HELD_S)
                raise
        job, self._asked_last = self._job, False
        if self._asked_in_vain > 1:  # once may be too early, or the trial's end
            raise NoCheckpointError(self.trial_id)
        while (report := job.next_report(_WAIT_S)) is None:
            if job.done:
                return self._end(job)
        result = {"workers": report.workers, **report.metrics}
        self._reported = report.checkpoint
        if report.checkpoint is not None:
            result[SHOULD_CHECKPOINT] = True
        return result

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Return Ray Tune's training result (metrics and checkpoint) for the latest checkpoint of the train loop."""
        if self._reported is not None:
            checkpoint = Checkpoint(self._reported, self._place().storage_filesystem)
            self._saved = _TrainingResult(checkpoint=checkpoint, metrics=copy.copy(self._last_result or {}))
            self._reported = None
        if self._saved is None:  # Tune also asks at the end of every trial, so that this is not yet wrong
            self._asked_in_vain, self._asked_last = self._asked_in_vain + 1, True
        return self._saved or _TrainingResult(checkpoint=None, metrics={})

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing, since the workers load the checkpoint themselves."""

    def restore(self, checkpoint_path: Any) -> None:
        """Set the checkpoint, from this or another trial, that the trial loads at its first step."""
        if checkpoint_path.checkpoint is None:
            raise NoCheckpointError(self.trial_id)
        where = _WhereItIs(checkpoint_path.checkpoint.path, checkpoint_path.checkpoint.filesystem)
        super().restore(_TrainingResult(checkpoint=where, metrics=checkpoint_path.metrics))
        self._start_from = checkpoint_path.checkpoint.path
        self._saved = checkpoint_path

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare this actor for another trial, or for the same trial with different parameters; always return True."""
        self.cleanup()
        self._last_result = None  # Ray leaves the last trial's
        self.setup(copy.deepcopy(new_config))
        return True

    def cleanup(self) -> None:
        """Stop the trial's job and release all its resources."""
        job, self._job = self._job, None
        if job is not None:
            job.stop(paused=self._asked_last and not job.done)

    def _place(self) -> StorageContext:
        """Return Tune's storage for this trial's results."""
        assert self._storage is not None, "Tune gives every trial a place"
        return self._storage

    def _start(self) -> TrialJob:
        """Start the trial's job in Tune's directory for the trial; constants override the train loop's own config."""
        storage, template = self._place(), self._template
        if self._constants:
            spec = template.spec
            spec = dataclasses.replace(spec, train_loop=with_config(spec.train_loop, self._constants))
            template = dataclasses.replace(template, spec=spec)
        return TrialJob(
            template,
            sweep=storage.experiment_dir_name,
            trial=self.trial_id,
            config=self._parameters,
            directory=storage.trial_fs_path,
            filesystem=storage.storage_filesystem,
            knowledge_path=posixpath.dirname(storage.experiment_fs_path),
            start_from=self._start_from,
        )

    def _end(self, job: TrialJob) -> dict[str, Any]:
        """Return the result that ends a trial; raise the error that made its job fail."""
        job.raise_error()
        if stopped := job.status.phase is JobPhase.STOPPED:
            time.sleep(_HELD_S)
        if self._last_result is None and self._saved is None:
            raise RuntimeError(
                f"trial {self.trial_id} was stopped before its first report: {job.status.message}"
                if stopped
                else f"the train loop of trial {self.trial_id} has ended without a report: call "
                "elastic_ray.report({...}) with the metric that TuneConfig(metric) names, once an epoch for instance"
            )
        return {RESULT_DUPLICATE: True}


def _notify_kept_actors() -> None:
    """Patch Tune's loop, which will run in this process, to call ``cleanup`` on an actor that it keeps for reuse.

    With ``reuse_actors=True``, Tune may keep the actor of a finished or paused trial and call nothing on it until
    another trial needs an actor or the search ends; the old trial would hold its workers until then. The actor cannot
    detect this itself: a searcher, a logger or a slow disk may also hold up Tune's loop for seconds, and if a trial
    then gave up its workers, it would lose its training since the last checkpoint.
    """
    # With a Ray that has it no longer, workers are given back when a trial comes, as said.
    keep = getattr(TuneController, "_maybe_cache_trial_actor", None)
    if keep is None or keep.__module__ == __name__:
        return

    def keep_and_tell(self: TuneController, trial: Any) -> bool:
        actor, kept = trial.temporary_state.ray_actor, bool(keep(self, trial))
        if kept and issubclass(trial.get_trainable_cls(), ElasticTrainable):
            actor.cleanup.remote()
        return kept

    TuneController._maybe_cache_trial_actor = keep_and_tell  # type: ignore[method-assign]


def _end_stopped_sweeps() -> None:
    """Patch Tune's loop, which will run in this process, to end an experiment whose sweep has been stopped."""
    look = getattr(TuneController, "_stop_experiment_if_needed", None)
    if look is None or look.__module__ == __name__:  # without it no trial is started any more, which fails each
        return

    def check_and_end(self: TuneController) -> None:
        reason = _why_stopped(self)
        if reason and not self._should_stop_experiment:
            logger.warning("the sweep ends with what there is: %s", printable(reason))
            self.request_stop_experiment()  # type: ignore[no-untyped-call]
        look(self)

    TuneController._stop_experiment_if_needed = check_and_end  # type: ignore[method-assign]


def _claim_sweeps() -> None:
    """Patch Tune's loop, which will run in this process, to claim the sweep's name before it starts the first trial."""
    add, clean = getattr(TuneController, "_maybe_add_actors", None), getattr(TuneController, "cleanup", None)
    if add is None or clean is None or add.__module__ == __name__:
        return

    def claim_and_add(self: TuneController) -> None:
        watch, (name, template) = _watch_of(self), _sweep_of(self)
        if template is not None and watch.driver is None:
            # Eight that start at once on two cores are all there when the last one is, and no worker starts before.
            self._max_pending_trials = min(self._max_pending_trials, _STARTING)
            first = _trials_of(self)[0]
            scheduler = getattr(self, "_scheduler_alg", None)
            promise = template.promise or read_promise(scheduler, first.stopping_criterion)
            trials = getattr(getattr(self, "search_alg", None), "total_samples", None)
            driver = this_driver(self.experiment_path, promise, template.limits, trials)
            directory, kept = _submission(name, first.storage)
            refuse_running_elsewhere(directory, kept, timeout_s=template.spec.elastic.storage_timeout_s)
            watch.claim(name, driver)
            watch.signs = _keep_submission(directory, kept)
            weakref.finalize(self, watch.signs.stop)  # where it is interrupted between its own steps
        watch.check()
        add(self)

    def clean_and_release(self: TuneController) -> None:
        watch, (name, _) = _watch_of(self), _sweep_of(self)
        try:
            clean(self)
        finally:  # it fails if the cluster is gone, and this process may continue the sweep on another one
            if watch.signs is not None:
                watch.signs.stop()
        if name and watch.driver is not None:
            release_sweep(name, watch.driver)

    TuneController._maybe_add_actors = claim_and_add  # type: ignore[method-assign]
    TuneController.cleanup = clean_and_release  # type: ignore[method-assign]
    for name in ("step", "checkpoint"):
        if (method := getattr(TuneController, name, None)) is not None:
            setattr(TuneController, name, _ending_signs(method))


def _ending_signs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of Tune's loop that ends the signs of life on Ctrl-C: after a second, Tune cleans up nothing."""

    @functools.wraps(method)
    def call(self: TuneController, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except Exception:  # Tune cleans up
            raise
        except BaseException:
            if (signs := _watch_of(self).signs) is not None:
                signs.stop()
            raise

    return call


def _submission(name: str, storage: StorageContext) -> tuple[RunStorage, SubmittedJob]:
    """Return an experiment's directory, and the record of how its sweep was submitted."""
    told, path = read_overrides(os.environ), storage.experiment_fs_path
    named = not _FRESH_NAME.search(storage.experiment_dir_name)
    kept = kept_submission(name, path, told.submission, told.command, told.user or login_name(), named=named)
    return RunStorage(path, storage.storage_filesystem), kept


def _keep_submission(directory: RunStorage, kept: SubmittedJob) -> SignsOfLife:
    """Store the record, for a later resume, and from now on show other clusters that the directory is in use."""
    try:
        directory.write_submission(kept.to_json())
    except OSError as error:
        logger.warning("`elastic-ray resume --all` will not know sweep %s: %s", kept.job, error)
    return SignsOfLife(directory)


def _resume_sweeps() -> None:
    """Patch Tune's loop, which will run in this process, to restore experiments during `elastic-ray resume --all`."""
    start: Any = TuneController.__init__
    if start.__module__ == __name__ or not read_overrides(os.environ).resume:
        return

    def resume_or_start(self: TuneController, *args: Any, resume_config: Any = None, **named: Any) -> None:
        storage = named.get("storage")
        again = resume_config is None and _was_submitted(storage)
        start(self, *args, resume_config=tune.ResumeConfig() if again else resume_config, **named)
        if again and storage is not None and not self.resumed:
            raise RuntimeError(
                f"the sweep in {storage.experiment_fs_path} cannot be restored (see Ray's log). To start it "
                "again, move that directory away"
            )

    TuneController.__init__ = resume_or_start  # type: ignore[method-assign]


def _was_submitted(storage: StorageContext | None) -> bool:
    """True if an experiment's directory holds the saved arguments of `elastic-ray submit`."""
    if storage is None:
        return False
    path = posixpath.join(storage.experiment_fs_path, SUBMISSION_FILE)
    return bool(storage.storage_filesystem.get_file_info(path).is_file)


def read_promise(scheduler: Any, criterion: Any) -> Promise | None:
    """Return a Tune scheduler's promise (its rule for comparing trials); None if the scheduler has no such rule.

    ASHA, HyperBand and median stopping are supported with ``time_attr="training_iteration"``.

    Args:
        criterion: The ``stop`` criterion of a trial; a limit on ``training_iteration`` in it lowers ``max_t``.
    """
    scheduler = getattr(scheduler, "_base_scheduler", scheduler)
    metric, mode = getattr(scheduler, "_metric", None), str(getattr(scheduler, "_mode", None))
    if not metric or getattr(scheduler, "_time_attr", "") != _REPORTS:
        return None
    most, grace, eta = math.inf, 1.0, 2.0  # median stopping cuts half
    if isinstance(scheduler, AsyncHyperBandScheduler):
        most, eta = scheduler._max_t, scheduler._reduction_factor
        grace = scheduler._brackets[0]._rungs[-1][0]
    elif isinstance(scheduler, HyperBandScheduler):
        most, eta = scheduler._max_t_attr, scheduler._eta
        r0: Any = scheduler._get_r0
        grace = r0(scheduler._s_max_1 - 1)
    elif isinstance(scheduler, MedianStoppingRule):
        grace = scheduler._grace_period
    else:
        return None
    stop = criterion.get(_REPORTS, math.inf) if isinstance(criterion, Mapping) else math.inf
    most = min(most, stop)
    return Promise(
        metric=metric,
        mode=mode,
        max_t=None if most == math.inf else max(1, int(most)),
        grace_period=int(min(max(1, grace), most)),
        reduction_factor=eta,
    )


def _why_stopped(controller: TuneController) -> str:
    """Return why an experiment's sweep was stopped; empty if it was not, or if the next check is not due."""
    watch = _watch_of(controller)
    name, _ = _sweep_of(controller) if watch.due() else ("", None)
    return watch.stops.poll(name, watch.driver) if name else ""


def _trials_of(controller: TuneController) -> list[Any]:
    return list(controller.get_trials())  # type: ignore[no-untyped-call]


def _sweep_of(controller: TuneController) -> tuple[str, Template | None]:
    """Return an experiment's sweep and the settings its trials share; empty and None if no trial is elastic (yet)."""
    trial = next((t for t in _trials_of(controller) if issubclass(t.get_trainable_cls(), ElasticTrainable)), None)
    if trial is None:
        return "", None
    template: Template = trial.get_trainable_cls()._template
    return str(template.sweep or trial.storage.experiment_dir_name), template


def _watch_of(controller: TuneController) -> _Watch:
    """Return this module's state for an experiment, kept outside it because ``Tuner.restore`` would restore it."""
    return _watches.setdefault(controller, _Watch())


class SignsOfLife(threading.Thread):
    """Thread that writes into a sweep's directory, for other clusters, that its driver lives."""

    def __init__(self, directory: RunStorage, every_s: float = ALIVE_EVERY_S) -> None:
        super().__init__(name="sweep-signs-of-life", daemon=True)
        self._directory, self._every_s, self._stopped = directory, every_s, threading.Event()
        self.start()

    def run(self) -> None:
        """Write until stopped; storage that does not answer is asked again."""
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):
                self._directory.write_alive()
            self._stopped.wait(self._every_s)

    def stop(self) -> None:
        """End the thread after the write in progress."""
        self._stopped.set()


class _Watch:
    """State of an experiment's sweep in this process: its driver, its claim, and the timer for checking for a stop."""

    def __init__(self) -> None:
        self._next_s, self.stops = 0.0, StopWatch()
        self.driver: SweepDriver | None = None
        self.signs: SignsOfLife | None = None
        self._claiming: concurrent.futures.Future[None] | None = None

    def claim(self, name: str, driver: SweepDriver) -> None:
        """Claim the sweep with this name for the driver; raise SweepRunsError if another driver has it.

        A sweep without an actor has no other driver. In that case, an actor is started in the background; see
        :meth:`check`.
        """
        if sweep_runs(name):
            claim_sweep(name, driver)
        else:
            self._claiming = concurrent.futures.Future()
            threading.Thread(target=self._claim, args=(self._claiming, name, driver), daemon=True).start()
        self.driver = driver

    @staticmethod
    def _claim(claiming: concurrent.futures.Future[None], name: str, driver: SweepDriver) -> None:
        try:
            claim_sweep(name, driver)
            claiming.set_result(None)
        except Exception as error:
            claiming.set_exception(error)

    def check(self) -> None:
        """Raise SweepRunsError, or any other error from a claim in the background."""
        if self._claiming is not None and self._claiming.done():
            claiming, self._claiming = self._claiming, None
            claiming.result()

    def due(self) -> bool:
        """True if a check is due; if so, the next one is scheduled."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + _LOOK_S
        return True


_watches: weakref.WeakKeyDictionary[TuneController, _Watch] = weakref.WeakKeyDictionary()


def _check_space(config: Mapping[str, Any]) -> None:
    for name in config:
        check_searchable(name)
