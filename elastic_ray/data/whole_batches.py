"""SHELL: batches of a loader that go whole to one rank each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ray.data.batches import Fetching, MapBatches, StepBatches, StepSplit
from elastic_ray.data.order import EpochOrder, digest
from elastic_ray.data.private_random import PrivateRandom
from elastic_ray.data.sharding import Indices, Order, batch_ends, whole_step


class BatchSamplerOrder:
    """The order that a batch sampler gives, and where its batches end.

    Read once an epoch, with every random generator that it can use seeded from the seed and the epoch (see
    ``SamplerOrder``), so that it gives the same batches on every rank.
    """

    def __init__(self, batch_sampler: Iterable[Sequence[int]], *, samples: int) -> None:
        if isinstance(batch_sampler, Iterator) or not isinstance(batch_sampler, Iterable):
            raise TypeError(
                "batch_sampler must be an iterable that each epoch can read again (a list of lists of indices, a "
                f"BatchSampler), but got {type(batch_sampler).__name__}"
            )
        self._batch_sampler, self._samples = batch_sampler, samples
        self.ends: list[int] = []

    def epoch_order(self, seed: int, epoch: int) -> Indices:
        """Return the batches of an epoch in order; sets ``ends``.

        Raises ValueError: an empty batch, or an index outside the dataset.
        """
        for told in (self._batch_sampler, getattr(self._batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(told, "set_epoch", None)):
                set_epoch(epoch)
        with PrivateRandom(seed=seed, epoch=epoch, owner=self._batch_sampler):
            limit = max(100 * self._samples, 10_000_000)
            drawn = itertools.islice(self._batch_sampler, limit + 1)
            batches = [np.asarray(batch, dtype=np.int64) for batch in drawn]
        if len(batches) > limit:
            raise ValueError(f"a batch_sampler must come to an end, but gave more than {limit} batches")
        if not batches or not all(len(batch) for batch in batches):
            raise ValueError("a batch_sampler must give at least one batch, and none that is empty")
        order = np.concatenate(batches)
        if order.min() < 0 or order.max() >= self._samples:
            raise ValueError(
                f"indices must be in 0..{self._samples - 1}, the samples of the dataset, but "
                f"{type(self._batch_sampler).__name__} gave {order.min()}..{order.max()}"
            )
        self.ends = np.cumsum([len(batch) for batch in batches]).tolist()
        return order


class WholeBatches(MapBatches):
    """Source of whole batches: each step gives every rank the next one; the last ranks of a pass may have none.

    Args:
        batch_size: samples of a batch; of no account where the order is a ``BatchSamplerOrder``.
        drop_last: leave out a last batch that is shorter.
    """

    def __init__(
        self,
        dataset: Any,
        make_order: Callable[[], EpochOrder],
        *,
        seed: int,
        fetching: Fetching,
        batch_size: int,
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, make_order, seed=seed, fetching=fetching)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._ends: tuple[Order, Sequence[int]] | None = None

    def ends(self, epoch: int) -> Sequence[int]:
        """Return the positions at which the epoch's batches end."""
        order = self.indices(epoch)
        if self._ends is None or self._ends[0] is not order:
            if isinstance(self._order, BatchSamplerOrder):
                ends = self._order.ends
            else:
                ends = batch_ends(len(order), self._batch_size, drop_last=self._drop_last)
            self._ends = order, ends
        return self._ends[1]

    def _plan(self, epoch: int, position: int, cut: StepSplit) -> Callable[[], Iterator[tuple[int, list[int]]]]:
        return functools.partial(_own_batches, self.indices(epoch), self.ends(epoch), position, cut)

    def step(self, epoch: int, position: int, cut: StepSplit) -> StepBatches:
        """Return the step at ``position``: a batch for each rank, as long as there are some."""
        ends = self.ends(epoch)
        batches = whole_step(ends, position=position, world_size=cut.world_size)
        if not batches:
            return StepBatches(total=ends[-1] if ends else 0)
        counts = [last - first for first, last in batches] + [0] * (cut.world_size - len(batches))
        fetches = [self.fetch] if cut.rank < len(batches) else []
        return StepBatches(total=ends[-1], sizes=[[count] for count in counts], fetches=fetches)

    def facts(self, epoch: int) -> Mapping[str, Any]:
        """Return the facts of ``MapBatches`` and a digest of where batches end."""
        ends = np.asarray(self.ends(epoch), dtype=np.int64)
        return {**super().facts(epoch), "the batches' ends": f"{digest(ends):016x}"}

    def can_switch(self, position: int, total: int, world_size: int) -> bool:
        """True: a group of any size can continue from the end of a batch."""
        return True


def _own_batches(order: Order, ends: Sequence[int], position: int, cut: StepSplit) -> Iterator[tuple[int, list[int]]]:
    """Yield this rank's batches from ``position``, each with the position of its first sample."""
    while batches := whole_step(ends, position=position, world_size=cut.world_size):
        if cut.rank < len(batches):
            first, last = batches[cut.rank]
            yield first, order[first:last].tolist()
        position = batches[-1][1]
