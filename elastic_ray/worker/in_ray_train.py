"""SHELL: redirection of the functions of ``ray.train`` to their ``elastic_ray`` equivalents inside a worker."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_ray.late_patch import patched

_HOME = "ray.train.v2._internal.execution.train_fn_utils"
_TORCH_HOME = "ray.train.v2.torch.train_loop_utils"
_PREPARED = "elastic_ray.integrations.ray_train"  # by its name: this floor knows nothing of that one
# How many workers Ray's own functions are to find, so that they wrap a model, and leave a loader's sampler alone.
_WORKERS_FOUND_BY = {"prepare_model": 2, "prepare_data_loader": 1}
_REFUSED = {
    "get_all_reported_checkpoints": "JobHandle.events() tells of checkpoints, elastic_ray.get_checkpoint() gives the "
    "one to continue from"
}


@contextlib.contextmanager
def in_ray_train() -> Iterator[None]:
    """Redirect ``ray.train.report``, ``get_checkpoint`` and other functions to elastic_ray within the context."""
    with (
        patched(_HOME, "_train_fn_utils", _TrainFnUtils()),
        patched(_TORCH_HOME, "DistributedDataParallel", _prepared_model),
        patched(_TORCH_HOME, "_WrappedDataLoader", _prepared_loader),
    ):
        yield


def _prepared() -> Any:
    return importlib.import_module(_PREPARED)


def _prepared_model(*args: Any, **options: Any) -> Any:
    return _prepared().model(*args, **options)


def _prepared_loader(*args: Any) -> Any:
    return _prepared().loader(*args)


def _delete_stored(checkpoint: Any) -> None:
    """Delete the local files of this process's last reported checkpoint if they have been copied to storage.

    Other files are kept, such as other ranks' files, which are not copied and may be in the same directory.
    """
    import pyarrow.fs

    from elastic_ray.run.current import session_of_thread

    session = session_of_thread()
    stored = getattr(session.controller, "stored", None) if session is not None else None
    if stored and stored != checkpoint.path and isinstance(checkpoint.filesystem, pyarrow.fs.LocalFileSystem):
        shutil.rmtree(checkpoint.path, ignore_errors=True)


class _TrainFnUtils:
    """Replacement for Ray Train's ``TrainFnUtils``, whose functions ``ray.train`` calls."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **options: Any) -> None:
        import elastic_ray

        deletes = bool(options.pop("delete_local_checkpoint_after_upload", False))
        set_options = [name for name, value in options.items() if value and getattr(value, "value", "") != "SYNC"]
        if set_options:
            raise ValueError(
                f"ray.train.report({set_options[0]}=...) has no meaning in an elastic job: elastic_ray.report(metrics, "
                "checkpoint) copies rank 0's checkpoint to the run's storage under a name of its own and returns then"
            )
        elastic_ray.report(metrics, checkpoint)
        if deletes and checkpoint is not None:
            _delete_stored(checkpoint)

    def get_checkpoint(self) -> Any:
        import elastic_ray

        return elastic_ray.get_checkpoint()

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        import elastic_ray

        return elastic_ray.get_dataset_shard(dataset_info.dataset_name)

    def get_context(self) -> _Context:
        asking = sys._getframe()
        while asking.f_back is not None and asking.f_globals["__name__"].startswith(("ray.train", __name__)):
            if (function := asking.f_code.co_name) in _WORKERS_FOUND_BY:
                _prepared().check(function, asking.f_locals)
                return _Context(_WORKERS_FOUND_BY[function])
            asking = asking.f_back
        return _Context()

    def barrier(self) -> None:
        import elastic_ray

        elastic_ray.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        import elastic_ray

        return elastic_ray.broadcast(data)

    def get_preemption_info(self) -> None:
        """Return None, as preemptions do not interrupt the train function: the job moves or saves itself in time."""

    def is_distributed(self) -> bool:
        return False  # what asks this wants the device: the worker's own, cuda:0 of those that it sees

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reason = _REFUSED.get(name, "elastic_ray has functions of its own for what an elastic job can do")
        raise RuntimeError(f"ray.train's {name} has no meaning in an elastic job: {reason}")


class _Context:
    """Context returned by ``ray.train.get_context()``, with current values as in ``elastic_ray.get_context()``."""

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers

    def get_world_size(self) -> int:
        """Return the number of workers in the current group, or a fixed number that one of Ray's functions needs."""
        import elastic_ray

        return self._workers or elastic_ray.get_context().get_world_size()

    def __getattr__(self, name: str) -> Any:
        import elastic_ray

        context = elastic_ray.get_context()
        if name.startswith("__") or not hasattr(context, name):
            raise AttributeError(
                f"ray.train.get_context() has no {name!r} in an elastic job; it has "
                + ", ".join(known for known in dir(context) if known.startswith("get_"))
            )
        return getattr(context, name)
