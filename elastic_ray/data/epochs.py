"""How a dataset's copies in worker processes learn of a new epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic_ray.data.worker_errors import tell_errors

EpochHook = Callable[[Any, int], object]


class EpochBatch(list[int]):
    """Indices of a batch, with the epoch that they belong to: it reaches a worker process with the work itself."""

    __slots__ = ("epoch",)

    def __init__(self, epoch: int, indices: Sequence[int]) -> None:
        super().__init__(indices)
        self.epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochBatch, (self.epoch, list(self))


class FollowsEpochs:
    """A dataset that is told of each epoch by its first batch, in whichever process it is.

    Args:
        dataset: the user's.
        hook: called with the dataset and the epoch; None for no hook.
        sets_epoch: also call ``dataset.set_epoch(epoch)`` where it exists, before the hook.
    """

    def __init__(self, dataset: Any, hook: EpochHook | None, *, sets_epoch: bool) -> None:
        self.dataset = dataset
        self._hook = hook
        self._sets_epoch = sets_epoch and callable(getattr(dataset, "set_epoch", None))
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: EpochBatch) -> list[Any]:
        """The batch's samples; torch's fetcher asks for them together."""
        dataset = self.dataset
        if batch.epoch != self._epoch:
            self._epoch = batch.epoch
            if self._sets_epoch:
                dataset.set_epoch(batch.epoch)
            if self._hook is not None:
                self._hook(dataset, batch.epoch)
        if getattr(dataset, "__getitems__", None):
            return list(dataset.__getitems__(list(batch)))
        return [dataset[index] for index in batch]


def _leave_others_alone() -> None:
    """Have worker processes of other loaders be let go in silence: they are their loader's, and no children of this.

    Iterators over them came along with the memory of the process that this one was forked from. Python's collector
    would have them end their workers, which raises "can only test a child process" for each.
    """
    from torch.utils.data import dataloader

    dataloader._MultiProcessingDataLoaderIter.__del__ = lambda self: None  # type: ignore[method-assign]


class WorkerInit:
    """A ``worker_init_fn`` that has errors told, and shows the user's dataset in ``get_worker_info().dataset``."""

    def __init__(self, inner: Callable[[int], object] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        from torch.utils.data import get_worker_info

        info: Any = get_worker_info()
        tell_errors()
        _leave_others_alone()
        if isinstance(info.dataset, FollowsEpochs):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._inner is not None:
            self._inner(worker)
