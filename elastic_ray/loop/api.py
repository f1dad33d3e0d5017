"""Public functions of a train loop: its session, its place in the job, reports, epochs."""

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
    """Return the session of the train loop that runs in this thread.

    Outside a trainer there is none yet: one is made that trains alone, or, under ``torchrun``, with the group that
    the environment describes.

    Raises RuntimeError: this is another thread of a job's worker than the train function's.
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
    """Return the session of a model that is being wrapped.

    Outside a trainer, a model that is wrapped after the first epoch, or after an opening that failed, begins another
    run of the process: a notebook's cell that is run again, the next fold. Loaders made since, and the one that has fed
    the run before, go along. A loop of the earlier run that continues nevertheless raises (see
    ``run.current.check_present``).
    """
    earlier = current_session()
    if earlier.elastic or not (earlier.synced or earlier.opening_failed):
        return earlier
    return _run_after(earlier)


def session_to_build() -> Session:
    """Return the session of what is registered before the first epoch.

    Outside a trainer never one whose opening failed.
    """
    session = current_session()
    return _run_after(session) if session.opening_failed and not session.elastic else session


def _run_after(earlier: Session) -> Session:
    """Start another run in this process, and move the loaders along."""
    from elastic_ray.standalone.session import session_after

    session = session_after(earlier)
    earlier.registry.call(HookPoint.REPLACED)
    set_session(session)
    for join in earlier.registry.loaders.late():
        join(session)
    leading = earlier.registry.loaders.leading
    if leading is not None:
        session.registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, lambda: _take_along(leading, session))
    return session


def _take_along(leading: weakref.ref[Any], session: Session) -> None:
    """Move a loader made outside the train function to the next run, unless that has made its own."""
    loader = leading()
    if loader is not None and session.registry.loaders.info is None:
        loader.join(session)


@dataclasses.dataclass(frozen=True, slots=True)
class ElasticContext:
    """Position of this worker, in the style of ``ray.train.get_context()``. Values are read when asked for.

    Before the first epoch no group is formed yet; ranks and sizes are then those of the group that this worker is
    expected to join. Of the workers that start a job, or start it again, exactly one sees rank 0, and on each node one
    sees local rank 0; workers that join a running job never see rank 0. ``if get_world_rank() == 0: download()`` is
    thus right before the first epoch as well; but no other worker waits for it there.
    """

    _session: Session

    def get_world_size(self) -> int:
        """Return the number of workers of the present generation."""
        return self._session.group.rank_info.world_size

    def get_world_rank(self) -> int:
        """Rank of this worker, from 0."""
        return self._session.group.rank_info.rank

    def get_local_rank(self) -> int:
        """Rank of this worker among those on its node."""
        return self._session.group.rank_info.local_rank

    def get_local_world_size(self) -> int:
        """Return workers of the present generation on this worker's node."""
        return self._session.group.rank_info.local_world_size

    def get_node_rank(self) -> int:
        """Return the index of this worker's node in the job."""
        return self._session.group.rank_info.node_rank

    def get_generation(self) -> int:
        """Return the number of the present generation: how often the group has changed, 0 before the first."""
        return self._session.group.generation

    def get_job_name(self) -> str:
        """Name of the job."""
        return self._session.job

    def get_experiment_name(self) -> str:
        """Name of the job (the name that Ray Train uses)."""
        return self._session.job

    def get_global_step(self) -> int:
        """Return optimizer steps committed so far."""
        return self._session.progress.steps


def get_context() -> ElasticContext:
    """Return the context of this worker in its job."""
    return ElasticContext(current_session())


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report metrics, and a checkpoint to keep, from every rank; rank 0's are recorded.

    Metrics are numbers, strings, None, and lists, tuples and dicts (with string keys) of these, up to 256 KiB as JSON
    in all: they are read by processes of the cluster that run no user's code. NumPy's scalars, and arrays and tensors
    of one element, are recorded as numbers; other arrays and tensors of real numbers as lists.

    Replicas are identical, so rank 0's checkpoint stands for all. Files of a checkpoint that another rank passes in the
    same place are put into the same directory, as far as rank 0's has none of that name; a ``warning`` event says so
    where rank 0 has passed none. The call returns when the files have been copied to the run's storage, and the job
    knows of them.
    Storage that is silent, fails, or is not there, for ``ElasticConfig(storage_timeout_s)`` costs the checkpoint, which
    an event of kind ``storage`` says, and not the training: the metrics count, and the next checkpoint is tried again.

    Raises:
        TypeError: ``metrics`` is no mapping, or rank 0's hold something else; the message names it.
        ValueError: they are too large, nested deeper than 20 levels, or one holds itself.
        FileNotFoundError: the checkpoint is no directory. PermissionError: it may not be read.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping of names to values, but got {type(metrics).__name__}")
    session = current_session()
    if session.ledger.replaying:
        return  # the job has had this report before this worker came (back)
    if session.elastic and not session.synced:
        session.tell_of_early_report()
    number = session.count_report(saves=checkpoint is not None)
    if session.group.rank_info.rank == 0 and session.run.speaks:
        plain = plain_metrics(metrics)
        session.adaptation.runner.watched.reported(plain, number)
        session.registry.monitoring.take_report(plain, number)
        session.controller.report(plain, checkpoint, session.resume_point(), number)
    elif checkpoint is not None:
        session.controller.add_files(checkpoint, number)


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint to start from: the latest reported one when a job restarts, None otherwise.

    Workers that join a running job get their state from the others and need none.
    """
    checkpoint: Checkpoint | None = current_session().start.take_checkpoint()
    return checkpoint


def get_tracker_dir() -> str:
    """Return the directory for what the train function logs by itself: tensors, images, text, a profiler's traces.

    It belongs to the run, so that a new rank 0 continues where the one before has stopped: ``tensorboard/user`` in the
    run's directory, which TensorBoard shows beside the run's own numbers. Where storage is not local it is a directory
    of this node, whose files are copied there every 15 s and when the train function returns. Without a trainer it is
    ``runs/user`` in the present directory, or what the environment variable ``ELASTIC_RAY_TRACKER_DIR`` says.

    Every rank may call it; by custom rank 0 writes. A writer belongs to one process: open it when the process becomes
    rank 0, and tell it where it begins (``SummaryWriter(er.get_tracker_dir(), purge_step=...)``).

    Raises:
        OSError: it cannot be made.
    """
    return current_session().controller.tracker_dir()


def register_state(name: str, target: Any) -> None:
    """Make ``target`` part of what all workers share: moving averages of a model, counters, metrics, curricula.

    Workers that join have its state, checkpoints keep it, and a step that a failure voids takes back what user code did
    to it. It must be the same on every rank; sums of what differs belong into an ``Accumulator``. Call it before the
    first epoch, on every worker alike. A copy of it is made at the beginning of each step, so large states cost as much
    as they take to copy.

    Args:
        name: unique in the train loop.
        target: has ``state_dict()`` of tensors and plain values, and ``load_state_dict(state)``. Of a
            ``torch.nn.Module`` all parameters and buffers travel, persistent or not, its extra states
            (``get_extra_state``), modes, and the sums of a ``torchmetrics.Metric``.

    Raises:
        TypeError: it is no text, or has no such methods.
        ValueError: the name is empty, or taken.
        RuntimeError: training has begun.
    """
    from elastic_ray.state.shared_state import RegisteredState

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
    registered, name = RegisteredState(target, functools.partial(session.tell, "warning")), f"user/{name}"
    session.states.register(name, registered.state)
    if registered.extras is not None:
        session.states.register(f"{name}/parts", registered.extras)
    session.states.register_rollback(registered.remember, registered.roll_back, name)


def unit_mesh() -> DeviceMesh:
    """Return torch's ``DeviceMesh`` over the workers of this one's unit; see docs/units.md.

    Its dimensions are those of ``SchedulingConfig(unit=Unit(tp=2, shard=2))``, by name and in that order, or one for
    ``unit=2``. It stays the same as long as the worker lives: units come and go as a whole.

    Raises:
        RuntimeError: the job has no units, or this is no job.
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
    """Return the epoch in progress, from 0."""
    return current_session().progress.epoch
