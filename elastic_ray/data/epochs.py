"""Propagation of epoch numbers and random seeds to dataset copies in DataLoader worker processes."""

from __future__ import annotations

import hashlib
import multiprocessing.queues
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info


def send_errors() -> None:
    """Make a DataLoader worker process send an error in place of a batch that cannot be pickled.

    Python pickles a batch in a background thread of the worker process and only prints errors there, so the training
    process would wait for the batch forever.
    """
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


def _send_error(queue: Any, error: Exception, what: Any) -> None:
    """Send an error in place of ``what``, a ``(number, batch)``; replaces ``Queue._on_queue_feeder_error``."""
    worker = get_worker_info()
    if not isinstance(what, tuple) or worker is None:
        raise error
    told = RuntimeError(
        "a dataset and a collate_fn must return what can be pickled where num_workers > 0, but a batch cannot be sent "
        f"to the training process: {type(error).__name__}: {error}. Define its classes at the top level of a module "
        "or of the script, or use num_workers=0"
    )
    where = f"in DataLoader worker process {worker.id}"
    wrapped: Any = ExceptionWrapper
    queue.put((what[0], wrapped((RuntimeError, told, error.__traceback__), where)))


class EpochBatch(list[int]):
    """Indices of a batch, sent to worker processes with the batch's epoch and position."""

    __slots__ = ("epoch", "first")

    def __init__(self, epoch: int, first: int, indices: Sequence[int]) -> None:
        super().__init__(indices)
        self.epoch, self.first = epoch, first

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochBatch, (self.epoch, self.first, list(self))


def seed_sample(seed: int, epoch: int, position: int) -> None:
    """Seed the global generators of torch (CPU), NumPy and Python for the sample at ``position`` of an epoch.

    The random numbers depend only on these arguments, not on the number of workers or the process that loads the
    sample.
    """
    import numpy as np
    import torch

    text = f"{seed} {epoch} {position}".encode()
    words = struct.unpack("<QQI", hashlib.blake2b(text, digest_size=20).digest())
    torch.default_generator.manual_seed(words[0] >> 1)  # torch.manual_seed would tell CUDA, too
    random.seed(words[1])
    np.random.seed(words[2])  # noqa: NPY002


class FollowsEpochs:
    """Dataset wrapper that seeds each sample and notifies its dataset of each new epoch, in a worker process.

    Args:
        sets_epoch: whether the dataset's copies outlive an epoch, so that ``set_epoch`` is called, if there is one.
        seed: seed for random numbers drawn while loading samples.
    """

    def __init__(self, dataset: Any, *, sets_epoch: bool, seed: int) -> None:
        self.dataset = dataset
        self._sets_epoch = sets_epoch and callable(getattr(dataset, "set_epoch", None))
        self._epoch: int | None = None
        self._seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: EpochBatch) -> Any:
        """Return the batch's samples; torch's fetcher calls this once per batch."""
        dataset = self.dataset
        if self._sets_epoch and batch.epoch != self._epoch:
            self._epoch = batch.epoch
            dataset.set_epoch(batch.epoch)
        if getattr(dataset, "__getitems__", None):
            self._start(batch, 0)
            return dataset.__getitems__(list(batch))  # as torch's fetcher: whatever collate_fn takes
        found = []
        for number, index in enumerate(batch):
            self._start(batch, number)
            found.append(dataset[index])
        return found

    def _start(self, batch: EpochBatch, number: int) -> None:
        """Seed the generators for the batch's sample ``number``, which is about to be loaded."""
        seed_sample(self._seed, batch.epoch, batch.first + number)


def _leave_others_alone() -> None:
    """Disable the destructor of other loaders' iterators, whose worker processes are not children of this process.

    A fork copies such iterators with the memory of the parent process. When garbage collected, each would try to end
    its workers and raise "can only test a child process".
    """
    from torch.utils.data import dataloader

    setattr(dataloader._MultiProcessingDataLoaderIter, "__del__", lambda self: None)  # noqa: B010


class WorkerInit:
    """Initialiser of a worker process, which reports errors and puts the user's dataset into ``get_worker_info()``."""

    def __init__(self, inner: Callable[[int], object] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        from torch.utils.data import get_worker_info

        info: Any = get_worker_info()
        send_errors()
        _leave_others_alone()
        if isinstance(info.dataset, FollowsEpochs):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._inner is not None:
            self._inner(worker)
