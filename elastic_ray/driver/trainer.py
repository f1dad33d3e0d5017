"""SHELL: ``ElasticTrainer``, which checks the user's arguments, submits the job, and waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import ray.cloudpickle
from ray._private import worker as _ray_worker
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.v2.api.config import RunConfig, ScalingConfig
from ray.train.v2.api.result import Result

from elastic_ray.access import join, session_warning
from elastic_ray.adaptation.policies.stop_at import StopAt
from elastic_ray.adaptation.policy import Policy, check_policies
from elastic_ray.checkpoints.run_directory import RunStorage, resolve
from elastic_ray.config import ElasticConfig, SchedulingConfig
from elastic_ray.driver.display import Interrupts, JobDisplay, without_traceback
from elastic_ray.driver.handle import JobHandle, find_controller
from elastic_ray.driver.lease import CALL_TIMEOUT_S, START_TIMEOUT_S
from elastic_ray.driver.other_clusters import refuse_running_elsewhere, this_machine
from elastic_ray.driver.overrides import fresh_name, login_name, pop_name, read_overrides, script_stem
from elastic_ray.driver.ray_train_config import Scaling, job_name, read_run, read_scaling, refuse_arguments
from elastic_ray.errors import ImpossibleResourcesError, JobNameTakenError
from elastic_ray.integrations.ray_data.packing import (
    DatasetsOfJob,
    check_datasets,
    name_coordinator,
    pack_datasets,
    with_datasets,
)
from elastic_ray.job_spec import JobSpec
from elastic_ray.observe.trackers.callbacks import pack_callbacks
from elastic_ray.record.submitted import SubmittedJob
from elastic_ray.run.current import in_worker
from elastic_ray.worker.train_loop import pack
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.ray_cluster.autoscaler_presence import living_nodes, may_autoscale
from placement.storage.storage_calls import call_storage


def kept_submission(
    job: str, storage: str, submission: str, command: tuple[str, ...], user: str, *, named: bool = True
) -> SubmittedJob:
    """Return a submission's record to keep in a run's or sweep's directory; the arguments are its fields."""
    context = ray.get_runtime_context()
    return SubmittedJob(
        job=job,
        storage=storage,
        session=context.get_session_name(),
        address=context.gcs_address,
        submitted_s=time.time(),
        submission=submission,
        command=command,
        user=user,
        named=named,
        script=os.path.abspath(sys.argv[0]) if sys.argv and os.path.isfile(sys.argv[0]) else "",
        host=this_machine(),
    )


logger = logging.getLogger(__name__)

_POLL_S = 0.5
_ARGUMENTS = (
    "train_loop_per_worker",
    "adaptation",
    "train_loop_config",
    "scaling_config",
    "run_config",
    "elastic_config",
    "scheduling_config",
    "datasets",
    "model_fingerprint",
)
_STOP_TIMEOUT_S = 150.0  # it saves itself first


class ElasticTrainer:
    """Trainer that runs a PyTorch train function on workers that may join and leave while it runs.

    The arguments are Ray Train's, so that a ``TorchTrainer`` becomes elastic by changing one import. Arguments that an
    elastic job does not support raise an error with the reason. Options given to ``elastic-ray submit`` on the command
    line override the script's own (``elastic_ray.driver.overrides``).

    Example:
        ``ElasticTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=(1, 8))).fit()``

    Examples:
        >>> from elastic_ray import ElasticTrainer
        >>> from ray.train import ScalingConfig
        >>> trainer = ElasticTrainer(print, scaling_config=ScalingConfig(num_workers=(1, 4)))
        >>> trainer.spec().max_workers
        4
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        elastic_config: ElasticConfig | None = None,
        scheduling_config: SchedulingConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        model_fingerprint: str | None = None,
        adaptation: Policy | Sequence[Policy] | None = None,
        **unsupported: Any,
    ) -> None:
        """Check all arguments without starting anything; Ray need not be initialised yet.

        Args:
            train_loop_per_worker: Function that every worker runs, with no argument or with the config.
            train_loop_config: Config passed to the function.
            scaling_config: Number of workers (an int, or ``(min, max)``) and the resources of each.
            run_config: Name, storage, failure handling and checkpoints.
            elastic_config: How the job changes size and how fast it detects failures; None for the defaults.
            scheduling_config: Priority, tenant, deadline and other inputs to the allocator; None for the defaults.
            datasets: ``ray.data.Dataset`` objects keyed by name, for ``elastic_ray.get_dataset_shard(name)`` in the
                train function.
            model_fingerprint: Name for the model, such as ``"resnet18-224"``. Jobs with the same name and the same
                resources per worker share measured step times, even after they have ended. By default, it is derived
                from the model (see ``elastic_ray.record.fingerprint``).
            adaptation: One or more adaptation policies, which are control loops over the run (see
                ``elastic_ray.adaptation``). They are called in order, before the policies that the train function
                passes to ``AdaptiveDataParallel(policy=...)``. A policy passed in both places (same class, equal
                attributes) is called once.
            **unsupported: Other arguments of ``TorchTrainer``, which raise an error that names an alternative.

        Raises:
            TypeError: If an argument has a wrong type or is not supported, or if the function cannot be pickled.
            ValueError: If a value is wrong, or not supported by elastic jobs.
        """
        refuse_arguments(unsupported, _ARGUMENTS)
        _check_config("elastic_config", elastic_config, ElasticConfig)
        _check_config("scheduling_config", scheduling_config, SchedulingConfig)
        self._datasets = check_datasets(datasets)
        told = read_overrides(os.environ)
        policies = (*check_policies(adaptation), *([StopAt(told.replay)] if told.replay else []))
        self._train_loop = pack(train_loop_per_worker, train_loop_config, policies)
        self._scaling = read_scaling(told.scaling(scaling_config, ScalingConfig))
        self._run = read_run(run_config)
        self._callbacks = pack_callbacks(
            self._run.callbacks,
            run_config=run_config,
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
        )
        self._name = told.named(self._run.name or job_name(pop_name(os.environ)))
        self._submission, self._command, self._user = told.submission, told.command, told.user or login_name()
        self._elastic = elastic_config or ElasticConfig()
        self._scheduling = told.scheduled(scheduling_config or SchedulingConfig())
        self._scaling = _of_allowed_sizes(_in_units(self._scaling, self._scheduling), self._scheduling)
        _check_unit(self._scheduling, datasets=bool(self._datasets))
        self._fingerprint = _check_fingerprint(model_fingerprint)
        filesystem, self._storage_path = resolve(self._run.storage_path, self._run.storage_filesystem)
        self._filesystem = _picklable(filesystem)

    def submit(self) -> JobHandle:
        """Start the job and return its handle at once, initialising Ray if necessary.

        Raises:
            RuntimeError: If called within the train function of another job.
            ConnectionError: If the cluster named by RAY_ADDRESS or `ray start` does not respond.
            AccessRefusedError: If the cluster requires a token, and this process has none or a wrong one.
            ImpossibleResourcesError: If the cluster could never run the job, and has no autoscaler that could add the
                missing resources.
            JobNameTakenError: If an active job has the same name, here or on another cluster with the same storage.
            OSError: If the run's directory cannot be written, or its storage does not respond.
        """
        return self._submit(self.spec())

    def _submit(self, spec: JobSpec) -> JobHandle:
        """Start a job and return its handle."""
        from elastic_ray.job.controller import start

        _refuse_nested()
        join()
        check_resources(spec)
        _check_name(spec)
        if warning := session_warning():
            logger.warning("%s", warning)
        storage = RunStorage(spec.storage_path, spec.storage_filesystem, private=spec.elastic.private_files)
        storage.create_within(spec.elastic.storage_timeout_s)
        kept = kept_submission(
            spec.job, spec.storage_path, spec.submission, self._command, spec.user, named=self._name is not None
        )
        timeout_s = spec.elastic.storage_timeout_s
        refuse_running_elsewhere(storage, kept, timeout_s=timeout_s)
        before = call_storage(storage.where, "reading", lambda: len(storage.read_events()), timeout_s=timeout_s)
        kept = dataclasses.replace(kept, events_before=before)
        call_storage(storage.where, "writing", lambda: storage.write_submission(kept.to_json()), timeout_s=timeout_s)
        logging.getLogger("elastic_ray").setLevel(spec.log_level)
        try:
            controller = start(spec)
        except ValueError as error:
            if find_controller(spec.job) is None:
                raise
            raise JobNameTakenError(_name_taken(spec.job)) from error  # another driver was faster
        if spec.datasets:
            from elastic_ray.integrations.ray_data.coordinator import start_coordinator

            most = {name: amount * spec.max_workers for name, amount in spec.bundle.items()}
            packed = pack_datasets(self._datasets, spec.job, most)
            start_coordinator(spec.datasets, packed, controller, spec.runtime_env)
        return JobHandle(controller, spec)

    def fit(self) -> Result:
        """Run the job, show its progress and wait until it ends; Ctrl-C stops the job.

        Returns:
            Ray Train's ``Result``: last metrics, newest checkpoint, all reported rows and rank 0's return value.

        Raises:
            TrainFunctionError: If the train function raised; other errors of ``submit()`` and ``JobHandle.result()``
                may also be raised.
        """
        handle = self._submit(dataclasses.replace(self.spec(), shown=True))
        with without_raylet_dumps(), JobDisplay() as progress:
            try:
                with Interrupts() as interrupts:
                    _watch(handle, progress, interrupts)
            except KeyboardInterrupt as interrupt:
                print(f"job {handle.job}: saving and stopping (Ctrl-C once more leaves it to its lease)", flush=True)
                _stop(handle)
                named = "" if self._name else f" with RunConfig(name={handle.job!r})"
                print(f"job {handle.job}: run the script again{named} to continue it", flush=True)
                without_traceback(interrupt)
                raise
            progress.results(handle.job, handle.storage_path)
        return handle.result()

    def spec(self) -> JobSpec:
        """Return the specification of the job to submit, with a fresh name if the user gave no name."""
        job = self._name or fresh_name(script_stem(), datetime.datetime.now())
        train_loop, reader = self._train_loop, ""
        if self._datasets:
            reader = name_coordinator(job)
            train_loop = with_datasets(train_loop, DatasetsOfJob(reader, tuple(self._datasets)))
        return JobSpec(
            job=job,
            train_loop=train_loop,
            datasets=reader,
            min_workers=self._scaling.min_workers,
            max_workers=self._scaling.max_workers,
            bundle=self._scaling.bundle,
            use_gpu=self._scaling.use_gpu,
            label_selector=self._scaling.label_selector,
            storage_path=f"{self._storage_path.rstrip('/')}/{job}",
            storage_filesystem=self._filesystem,
            max_failures=self._run.max_failures,
            num_to_keep=self._run.num_to_keep,
            checkpoint_score_attribute=self._run.checkpoint_score_attribute,
            checkpoint_score_order=self._run.checkpoint_score_order,
            runtime_env=self._run.runtime_env,
            elastic=self._elastic,
            scheduling=self._scheduling,
            log_level=self._run.log_level,
            model_fingerprint=self._fingerprint,
            submission=self._submission,
            user=self._user,
            callbacks=self._callbacks,
            callback_names=tuple(type(callback).__name__ for callback in self._run.callbacks),
        )


def _in_units(scaling: Scaling, scheduling: SchedulingConfig) -> Scaling:
    """Return the worker limits and resources converted from workers to units (groups placed on one node)."""
    size, limits = scheduling.unit_size, (scaling.min_workers, scaling.max_workers)
    if any(workers % size for workers in limits):
        fitting = tuple(max(1, workers // size) * size for workers in limits)
        raise ValueError(
            f"ScalingConfig(num_workers) must be multiples of the {size} workers of a unit "
            f"(SchedulingConfig(unit={scheduling.unit})), but got {limits}; for example {fitting}"
        )
    return dataclasses.replace(
        scaling,
        min_workers=limits[0] // size,
        max_workers=limits[1] // size,
        bundle={name: amount * size for name, amount in scaling.bundle.items()},
    )


def _check_unit(scheduling: SchedulingConfig, *, datasets: bool) -> None:
    """Raise ValueError for data that units of several workers cannot read."""
    if scheduling.unit_size > 1 and datasets:
        raise ValueError(
            f"datasets= is not supported with SchedulingConfig(unit={scheduling.unit}), whose workers read the same "
            "samples: give an AdaptiveDataLoader a dataset with a length"
        )


def _of_allowed_sizes(scaling: Scaling, scheduling: SchedulingConfig) -> Scaling:
    """Narrow the worker limits to the smallest and largest allowed size. Raises ValueError if no size is allowed."""
    low, high = scaling.min_workers, scaling.max_workers
    try:
        low, high = scheduling.allowed_sizes.within(low, high)
    except ValueError as error:
        raise ValueError(f"num_workers={(low, high)} and SchedulingConfig exclude each other: {error}") from None
    return dataclasses.replace(scaling, min_workers=low, max_workers=high)


def check_resources(spec: JobSpec) -> None:
    """Raise ImpossibleResourcesError if the cluster could never run the job; only warn if an autoscaler could help."""
    from placement.planning.plan import unsatisfiable  # imports the policies, which trials do not need

    scheduling = spec.scheduling
    view = JobView(
        job=spec.job,
        bundle=spec.bundle,
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        label_selector=spec.label_selector,
        spot=scheduling.spot,
        sizes=scheduling.allowed_sizes,
        unit=scheduling.unit_size,
    )
    why = unsatisfiable(view, Cluster(nodes=living_nodes()))
    if why is None:
        return
    reason = why.of_unit(view.unit).explained
    if may_autoscale():
        logger.warning("%s; waiting, for an autoscaler may bring it", reason)
        return
    raise ImpossibleResourcesError(f"{reason}. (There is no autoscaler that could bring it.)")


def _check_config(name: str, config: object, kind: type) -> None:
    """Raise TypeError unless the configuration is None or an instance of ``kind``."""
    if config is not None and not isinstance(config, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, but got {config!r}")


def _check_fingerprint(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"model_fingerprint must be a name for the model, or None, but got {name!r}")
    if name is not None and not name.strip():
        raise ValueError(f"model_fingerprint must be a non-empty name, such as 'resnet18-224', but got {name!r}")
    return name


def _picklable(filesystem: Any) -> Any:
    """Return the file system after checking that it can be sent to workers."""
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(filesystem))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise TypeError(
            f"RunConfig(storage_filesystem) must be picklable to reach the workers, but {filesystem!r} is "
            f"not: {error}; pass storage_path as a URI instead"
        ) from error
    return filesystem


def _check_name(spec: JobSpec) -> None:
    """Raise JobNameTakenError if an active job has this name; close an ended job after giving its driver time."""
    deadline = time.monotonic() + min(spec.elastic.lease_s, CALL_TIMEOUT_S)
    while (existing := find_controller(spec.job)) is not None:
        try:
            status = ray.get(existing.status.remote(), timeout=START_TIMEOUT_S)
            if not status.phase.ended:
                raise JobNameTakenError(_name_taken(spec.job))
            if time.monotonic() > deadline:  # its driver died and never collected the result
                existing.close.remote()
        except GetTimeoutError:
            raise JobNameTakenError(_name_taken(spec.job)) from None
        except RayActorError:
            pass
        if time.monotonic() > deadline + CALL_TIMEOUT_S:
            raise JobNameTakenError(_name_taken(spec.job))
        time.sleep(0.1)


def _name_taken(job: str) -> str:
    return (
        f"a job named {job!r} is active on this cluster; choose another RunConfig(name), stop that one, or "
        f"use JobHandle.attach({job!r}) to get hold of it"
    )


def _refuse_nested() -> None:
    """Raise RuntimeError in a worker, because a nested job would wait for resources that the worker's job holds."""
    if in_worker():
        raise RuntimeError(
            "ElasticTrainer must be used by the driver, but a train function has called it, or a module that the train "
            "function is in has done so when a worker imported it: put `if __name__ == '__main__':` before what the "
            "script runs. For several trainings in one job wrap all their models before the first epoch, and divide "
            "one count of epochs among them"
        )


def _watch(handle: JobHandle, progress: JobDisplay, interrupts: Interrupts) -> None:
    """Show a job until it ends; raise KeyboardInterrupt after a Ctrl-C."""
    shown = 0
    after: int | None = None
    ended = False
    while not ended:
        ended = handle.wait(_POLL_S)
        interrupts.check()
        try:
            events, status = handle.events(shown), handle.status()
            for event in events:
                progress.event(handle.job, event)
            shown += len(events)
            while (report := handle.next_report(after, timeout=0.0)) is not None:
                after = report.index
                progress.report(handle.job, report, status.epochs)
        except TimeoutError as error:  # an overloaded node: the job itself may be well
            logger.warning("%s", error)
            continue
        progress.status(status)


def _stop(handle: JobHandle) -> None:
    try:
        handle.stop(reason="Ctrl-C")
        if not handle.wait(_STOP_TIMEOUT_S):
            logger.warning("job %s has not stopped within %g s; its lease ends it", handle.job, _STOP_TIMEOUT_S)
    except TimeoutError as error:
        logger.warning("%s", error)


_DUMP = "A worker died or was killed"


@contextlib.contextmanager
def without_raylet_dumps() -> Iterator[None]:
    """Log raylet messages about lost workers at debug level, because the job's events report them in one line."""
    theirs: Any = _ray_worker
    printed = theirs.print_to_stdstream

    def print_to_stdstream(data: Any, *args: Any, **options: Any) -> None:
        lines = data.get("lines") or ()
        if data.get("pid") == "raylet" and lines and str(lines[0]).startswith(_DUMP):
            logger.debug("%s", lines[0])
            return
        printed(data, *args, **options)

    theirs.print_to_stdstream = print_to_stdstream
    try:
        yield
    finally:
        theirs.print_to_stdstream = printed
