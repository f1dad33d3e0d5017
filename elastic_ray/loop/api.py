"""Public functions of a train loop: the worker's session, rank and group, reports, and shared state."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_ray.run.current import check_thread, session_of_thread, set_session
from elastic_ray.run.registry import HookPoint
from elastic_ray.state.plain_metrics import plain_metrics

if TYPE_CHECKING:
    from ray.train import Checkpoint
    from torch.distributed.device_mesh import DeviceMesh

    from elastic_ray.session.session import Session

logger = logging.getLogger(__name__)


def current_session() -> Session:
    """Return the session of the train loop that is running in the calling thread.

    Outside a trainer, the first call creates a session. Under ``torchrun``, the session uses the process group
    described by the environment; otherwise it trains with a single worker.

    Raises RuntimeError if called in a worker from any thread but the one that runs the train function.
    """
    session = session_of_thread()
    if session is None:
        check_thread()
        from elastic_ray.session.default_group import install
        from elastic_ray.standalone.session import standalone_session

        session = standalone_session()
        set_session(session)
        install()
    return session


def session_of_new_model() -> Session:
    """Return the session (run of a train function) that a model being wrapped belongs to.

    Outside a trainer, wrapping a model after the first epoch, or after a failed start, starts another run in the same
    process (a notebook cell that is run again, or the next cross-validation fold). The new run adopts the loaders made
    since then, and the loader that fed the previous run. If a loop in the previous run continues anyway, it raises the
    error from ``run.current.replaced_error``.
    """
    earlier = current_session()
    if earlier.elastic or not (earlier.synced or earlier.opening_failed):
        return earlier
    return _run_after(earlier)


def session_to_build() -> Session:
    """Return the session (run of a train function) for objects registered before the first epoch, such as loaders.

    Outside a trainer, a session that failed to start is replaced by a new one.
    """
    session = current_session()
    return _run_after(session) if session.opening_failed and not session.elastic else session


def _run_after(earlier: Session) -> Session:
    """Start another run in this process, and move the loaders to it."""
    from elastic_ray.standalone.session import session_after

    session = session_after(earlier)
    earlier.mark_replaced()
    earlier.registry.call(HookPoint.REPLACED)
    set_session(session)
    for join in earlier.registry.loaders.late():
        join(session)
    leading = earlier.registry.loaders.leading
    if leading is not None:
        session.registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, lambda: _take_along(leading, session))
    return session


def _take_along(leading: weakref.ref[Any], session: Session) -> None:
    """Move a loader made outside the train function to the next run, unless that run has its own loader."""
    loader = leading()
    if loader is not None and session.registry.loaders.info is None:
        loader.join(session)


@dataclasses.dataclass(frozen=True, slots=True)
class ElasticContext:
    """Rank and group of this worker, as in ``ray.train.get_context()``; each method returns the current value.

    Before the first epoch no group exists yet, and ranks and sizes describe the group that this worker is expected to
    join. When workers start or restart a job, exactly one of them sees rank 0, and one on each node sees local rank
    0. Workers that join a running job never see rank 0 before their first epoch. ``if get_world_rank() == 0:
    download()`` is therefore correct before the first epoch too, but the other workers do not wait for rank 0.
    """

    _session: Session

    def get_world_size(self) -> int:
        """Return the number of workers in the current generation (group of workers)."""
        return self._session.group.rank_info.world_size

    def get_world_rank(self) -> int:
        """Return this worker's rank in the current generation, from 0."""
        return self._session.group.rank_info.rank

    def get_local_rank(self) -> int:
        """Return this worker's rank on its node, from 0."""
        return self._session.group.rank_info.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of the current generation's workers on this worker's node."""
        return self._session.group.rank_info.local_world_size

    def get_node_rank(self) -> int:
        """Return the index of this worker's node in the job, from 0."""
        return self._session.group.rank_info.node_rank

    def get_generation(self) -> int:
        """Return the number of the current generation, which increases with each regrouping; 0 before the first."""
        return self._session.group.generation

    def get_job_name(self) -> str:
        """Return the name of the job."""
        return self._session.job

    def get_experiment_name(self) -> str:
        """Return the name of the job; this is Ray Train's name for :meth:`get_job_name`."""
        return self._session.job

    def get_global_step(self) -> int:
        """Return the number of committed training steps: steps of a loader with a backward pass."""
        return self._session.progress.steps


def get_context() -> ElasticContext:
    """Return this worker's context: its rank, the size of its group, the job's name and the current step."""
    return ElasticContext(current_session())


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report metrics, and optionally a checkpoint; call it on every rank, but only rank 0's metrics are recorded.

    Metrics are numbers, strings, None, and lists, tuples and dicts (with string keys) of these, up to 256 KiB in total
    as JSON, because cluster processes that run no user code read them. NumPy scalars, and arrays and tensors with one
    element, are recorded as numbers; other arrays and tensors of real numbers are recorded as lists.

    Replicas are identical, so a checkpoint from rank 0 is enough. If other ranks pass a checkpoint in the same call,
    their files are added to rank 0's directory, unless rank 0 has a file of the same name. If rank 0 passes no
    checkpoint, the other ranks' files are discarded, and a ``warning`` event says so. The call blocks until the files
    have been copied to the run's storage and the job has been notified.

    If storage fails, or does not respond within ``ElasticConfig(storage_timeout_s)``, the checkpoint is dropped and an
    event of kind ``storage`` reports it. The metrics are still recorded, training continues, and the next checkpoint is
    attempted as usual.

    A step that is lost, because a worker was, is drawn again; what it reports then replaces what it had reported. If
    rank 0 is lost before it makes a report, the metrics are recorded that the next rank 0 has passed in the same call.

    Raises:
        TypeError: ``metrics`` is not a mapping, or rank 0's metrics have an unsupported type; the message names it.
        ValueError: the metrics are too large, nested deeper than 20 levels, or contain themselves.
        FileNotFoundError: the checkpoint is not a directory. PermissionError: it is not readable.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to values, but got {type(metrics).__name__}")
    session = current_session()
    if session.ledger.replaying:
        return  # the job has had this report before this worker came (back)
    if session.elastic and not session.synced:
        session.warn_of_early_report()
    number = session.count_report(saves=checkpoint is not None)
    if session.group.rank_info.rank == 0 and session.run.speaks:
        plain = plain_metrics(metrics)
        session.make_missed_reports(number)
        session.adaptation.runner.watched.reported(plain, number)
        session.registry.monitoring.record_report(plain, number)
        session.controller.report(plain, checkpoint, session.resume_point(), number)
        return
    session.keep_report(metrics, number)
    if checkpoint is not None:
        session.controller.add_files(checkpoint, number)


def get_checkpoint() -> Checkpoint | None:
    """Return the last reported checkpoint if the job is restarting from one; otherwise return None.

    Workers that join a running job receive their state from the other workers and need no checkpoint.
    """
    checkpoint: Checkpoint | None = current_session().start.claim_checkpoint()
    return checkpoint


def get_tracker_dir() -> str:
    """Return the directory for the train function's own logs: tensors, images, text, profiler traces.

    The directory belongs to the run, not to the worker, so a new rank 0 continues where the previous one stopped. It is
    ``tensorboard/user`` in the run's directory, so that TensorBoard shows these logs next to the run's own numbers. If
    storage is not local, the directory is on this node, and its files are copied to storage every 15 s and when the
    train function returns. Without a trainer, the directory is the value of the environment variable
    ``ELASTIC_RAY_TRACKER_DIR``, or ``runs/user`` in the current directory.

    Every rank may call this; usually only rank 0 writes. A writer belongs to one process: open it when the process
    becomes rank 0, and pass the current step (``SummaryWriter(er.get_tracker_dir(), purge_step=...)``).

    Raises:
        OSError: the directory cannot be created.
    """
    return current_session().controller.tracker_dir()


def register_state(name: str, target: Any) -> None:
    """Add ``target`` to the state that all workers share: moving averages of a model, counters, metrics, curricula.

    Joining workers receive this state, and checkpoints include it. If a failure voids a step, changes that user code
    made to the state during the step are undone. The state must be the same on every rank; use an ``Accumulator`` for
    values that differ between ranks. Call this before the first epoch, on every worker. The state is copied at the
    start of each step, so a large state slows down every step.

    Args:
        name: name of the state, unique in the train loop.
        target: object with ``state_dict()``, which returns tensors and plain values, and ``load_state_dict(state)``.
            For a ``torch.nn.Module``, the state includes all parameters, all buffers (persistent or not), extra states
            (``get_extra_state``), train/eval modes, and the sums of any ``torchmetrics.Metric``.

    Raises:
        TypeError: the name is not text, or ``target`` lacks one of these methods.
        ValueError: the name is empty or already used.
        RuntimeError: training has started.
    """
    from elastic_ray.state.registered import RegisteredState

    if not isinstance(name, str):
        raise TypeError(f"name must be text, but got {name!r}")
    if not name:
        raise ValueError("name must name the state, but got ''")
    if isinstance(target, type) or not all(
        callable(getattr(target, method, None)) for method in ("state_dict", "load_state_dict")
    ):
        raise TypeError(
            f"state {name!r} must have state_dict() and load_state_dict(state), "
            f"but {type(target).__name__} has not both"
        )
    session = session_to_build()
    if session.synced:
        raise RuntimeError(f"state {name!r} must be registered before the first epoch, so that all workers have it")
    registered, name = RegisteredState(target, functools.partial(session.notify, "warning")), f"user/{name}"
    session.states.register(name, registered.state)
    if registered.extras is not None:
        session.states.register(f"{name}/parts", registered.extras)
    session.states.register_rollback(registered.remember, registered.roll_back, name)


def unit_mesh() -> DeviceMesh:
    """Return torch's ``DeviceMesh`` over the workers of this worker's unit; see docs/units.md.

    For ``SchedulingConfig(unit=Unit(tp=2, shard=2))``, the mesh has the dimensions ``tp`` and ``shard``, in this order;
    for ``unit=2``, it has a single dimension. The mesh never changes during a worker's lifetime, because only complete
    units join and leave. The first call creates the mesh, so all workers of the unit must make it at the same point.

    Raises:
        RuntimeError: the job has no units, or the code does not run in a job.
    """
    unit = current_session().run.unit
    if unit is None:
        raise RuntimeError(
            "unit_mesh() is for jobs of units: ask for workers that come and go together, with "
            "ElasticTrainer(..., scheduling_config=SchedulingConfig(unit=2)) or unit=Unit(tp=2)"
        )
    mesh: DeviceMesh = unit.mesh
    return mesh


def current_epoch() -> int:
    """Return the number of the current epoch, from 0."""
    return current_session().progress.epoch
