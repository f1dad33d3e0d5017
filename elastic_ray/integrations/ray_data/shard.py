"""SHELL over Ray Data: ``get_dataset_shard``: a job's datasets in its train function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from torch.utils.data import IterableDataset

from elastic_ray.integrations.ray_data.batches import RayDataBatches
from elastic_ray.integrations.ray_data.coordinator import find_coordinator
from elastic_ray.integrations.ray_data.run import datasets_of_thread
from elastic_ray.run.current import session_of_thread
from placement.ray_cluster.named_actors import insist

_PATIENCE_S = 60.0
_DESCRIBE_S = 180.0  # of files, Ray Data reads some metadata
_OF_RAY = ("iter_batches", "iter_rows", "iter_tf_batches", "iter_torch_batches", "materialize", "to_tf", "to_torch")


def get_dataset_shard(dataset_name: str = "train") -> RayDataShard:
    """A dataset of ``ElasticTrainer(datasets={...})``, for an ``AdaptiveDataLoader`` of the train function.

    All workers read one ordered execution of it in each epoch, and the loader deals its rows by position: each row once
    an epoch, however workers come, go and fail. See ``docs/data.md`` for the order, and for what holds after a restart.

    Args:
        dataset_name: its key in ``datasets``.

    Raises:
        KeyError: the job has no dataset of this name.
        RuntimeError: not in the train function of a job that was given datasets, or what reads them does not answer.
    """
    run = datasets_of_thread()
    if run is None:
        raise RuntimeError(_no_datasets(dataset_name))
    if dataset_name not in run.names:
        raise KeyError(f"no dataset named {dataset_name!r} was given to ElasticTrainer(datasets=...), but {run.names}")
    coordinator = find_coordinator(run.coordinator, _PATIENCE_S)
    try:
        rows = insist(lambda: coordinator.describe.remote(dataset_name), timeout_s=_DESCRIBE_S)
    except GetTimeoutError:
        raise RuntimeError(
            f"the process that reads the job's datasets could not tell within {_DESCRIBE_S:g} s how many rows "
            f"{dataset_name!r} has: is what it reads within reach of the head node?"
        ) from None
    return RayDataShard(dataset_name, coordinator, rows, run.token)


class RayDataShard(IterableDataset[Any]):
    """A dataset of the job, for ``AdaptiveDataLoader(shard, batch_size)``; :func:`get_dataset_shard` makes it.

    Attributes:
        name: its key in ``ElasticTrainer(datasets=...)``.
        known_rows: rows of an epoch, where Ray Data knows them without reading; else None, and the loader has no
            length.
    """

    def __init__(self, name: str, coordinator: Any, known_rows: int | None, run: str) -> None:
        self.name, self.known_rows = name, known_rows
        self._coordinator, self._run = coordinator, run

    def batch_source(self, collate: Callable[[Any], Any] | None) -> RayDataBatches:
        """What a loader takes its batches from.

        Args:
            collate: makes a batch, as Ray Data's ``collate_fn``: from a dict of column to NumPy array, or, for a
                ``ray.data.collate_fn.ArrowBatchCollateFn`` or ``PandasBatchCollateFn``, from such a table.
        """
        return RayDataBatches(self.name, self._coordinator, known_rows=self.known_rows, collate=collate, run=self._run)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(_way_out(self.name, "iter()"))

    def __getattr__(self, attribute: str) -> Any:
        if attribute in _OF_RAY:
            raise AttributeError(_way_out(self.name, attribute))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")


def _way_out(name: str, asked: str) -> str:
    return (
        f"a dataset shard of an elastic job has no {asked}, for rows are dealt out as workers come and go: iterate "
        f"over elastic_ray.AdaptiveDataLoader(elastic_ray.get_dataset_shard({name!r}), batch_size), whose batch_size "
        "is that of all workers together; collate_fn= is as in iter_torch_batches"
    )


def _no_datasets(name: str) -> str:
    """Why there are none here."""
    session = session_of_thread()
    if session is not None and session.elastic and ray.is_initialized():
        return f"the job has no datasets: pass ElasticTrainer(..., datasets={{{name!r}: ray.data.read_parquet(...)}})"
    return (
        "get_dataset_shard() is for the train function of an ElasticTrainer(..., datasets={...}): without a trainer, "
        "and under torchrun, nothing reads a Ray dataset for the group. Use elastic_ray.ArrowDataset for Parquet "
        "files, or ds.iter_torch_batches() in a single process"
    )
