"""SHELL over Ray Data: packs a job's datasets in the driver and unpacks them in the coordinator."""

from __future__ import annotations

import contextvars
import dataclasses
import pickle
import secrets
import zlib
from collections.abc import Mapping
from typing import Any

import ray.cloudpickle
from ray.experimental import internal_kv

from elastic_ray.worker.train_loop import load
from placement.ray_cluster.notes import NAMESPACE

_run: contextvars.ContextVar[DatasetsOfJob | None] = contextvars.ContextVar("elastic_ray_datasets", default=None)


class DatasetsOfJob:
    """Context manager that gives the train function access to the job's dataset names and dataset coordinator.

    Attributes:
        token: Identifier of this call to the train function, new each time the context is entered.
    """

    def __init__(self, coordinator: str, names: tuple[str, ...]) -> None:
        self.coordinator, self.names, self.token = coordinator, names, ""

    def __enter__(self) -> DatasetsOfJob:
        self.token = secrets.token_hex(8)
        _run.set(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _run.set(None)


def datasets_of_thread() -> DatasetsOfJob | None:
    """Return the datasets of the train function running in this thread, or None if it has none."""
    return _run.get()


_MOST_INLINE_BYTES = 32 << 10  # Ray keeps larger arguments in its object store, where a restart may not find them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedDatasets:
    """A job's datasets, ready to be sent to the coordinator."""

    pickled: bytes = b""  # datasets that can be read from where they are stored, by name, as one pickle
    stored: str = ""  # where that is kept instead if it is large, in Ray's control store; else empty
    # datasets whose blocks are in the cluster's memory, which live as long as their owner
    in_memory: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0  # for shuffles that have none
    # CPUs and GPUs that are left to the job's workers, as many as it may ever have
    left: Mapping[str, float] = dataclasses.field(default_factory=dict)


def check_datasets(datasets: Any) -> dict[str, Any]:
    """Return a job's datasets after checking them; None counts as no datasets."""
    if datasets is None:
        return {}
    if not isinstance(datasets, Mapping) or not all(isinstance(name, str) and name for name in datasets):
        raise TypeError(f"datasets must be a dict from names to ray.data.Dataset, but got {datasets!r}")
    from ray.data import Dataset

    for name, dataset in datasets.items():
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"datasets[{name!r}] must be a ray.data.Dataset, but is a {type(dataset).__name__}; make one "
                "with ray.data.read_parquet, ray.data.from_torch..., or wrap what PyTorch reads in "
                "elastic_ray.AdaptiveDataLoader in the train function"
            )
    try:
        _pickled(_readable(datasets))
    except Exception as error:
        raise TypeError(f"datasets cannot be sent to the cluster: {error}") from error
    return dict(datasets)


def name_coordinator(job: str) -> str:
    """Return a new name for a job's dataset coordinator, different for each run of the job."""
    return f"data:{job}:{secrets.token_hex(4)}"


def pack_datasets(datasets: Mapping[str, Any], job: str, left: Mapping[str, float]) -> PackedDatasets:
    """Return datasets checked by :func:`check_datasets`, packed for :func:`unpack` in another process.

    This process must be connected to Ray. The seed for shuffles depends only on the job's name, so that a resubmitted
    job continues in the same order. ``left`` holds the resource amounts to reserve for the job's workers.
    """
    readable = _readable(datasets)
    pickled, stored = _pickled(readable), ""
    if len(pickled) > _MOST_INLINE_BYTES:
        stored = f"datasets/{secrets.token_hex(8)}"
        internal_kv._internal_kv_put(stored.encode(), pickled, overwrite=True, namespace=NAMESPACE)
        pickled = b""
    in_memory = {name: each for name, each in datasets.items() if name not in readable}
    return PackedDatasets(pickled=pickled, stored=stored, in_memory=in_memory, seed=zlib.crc32(job.encode()), left=left)


def unpack(packed: PackedDatasets) -> dict[str, bytes]:
    """Return the datasets keyed by name, each pickled separately, because every execution needs its own copy."""
    pickled: bytes | None = packed.pickled
    if packed.stored:
        pickled = internal_kv._internal_kv_get(packed.stored.encode(), namespace=NAMESPACE)
    if pickled is None:
        raise LookupError(f"the datasets are no longer in Ray's control store ({packed.stored})")
    found = {**pickle.loads(pickled), **packed.in_memory}
    return {name: _pickled(dataset) for name, dataset in found.items()}


def forget(packed: PackedDatasets) -> None:
    """Delete the packed datasets from Ray's control store, if they were stored there."""
    if packed.stored:
        internal_kv._internal_kv_del(packed.stored.encode(), namespace=NAMESPACE)


def with_datasets(train_loop: bytes, run: DatasetsOfJob) -> bytes:
    """Return a pickled train function that has access to the job's datasets when it is called."""
    return _pickled((TrainLoopWithDatasets(train_loop, run), None))


class TrainLoopWithDatasets:
    """Pickled train function that runs with access to the job's datasets."""

    def __init__(self, packed: bytes, run: DatasetsOfJob) -> None:
        self._packed, self._run = packed, run

    def __call__(self) -> Any:
        with self._run:
            train_loop, config = load(self._packed)
            return train_loop() if config is None else train_loop(config)


def _readable(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the datasets that can be read again from storage, because their lineage is serializable."""
    return {name: each for name, each in datasets.items() if each.has_serializable_lineage()}


def _pickled(value: Any) -> bytes:
    return bytes(ray.cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
