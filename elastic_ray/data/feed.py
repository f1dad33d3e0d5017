"""SHELL over torch's DataLoader: fetches the batches of one rank, whatever group it belongs to by then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, default_collate

from elastic_ray.data.order import EpochOrder, StreamSharder
from elastic_ray.data.sharding import Indices, can_switch, rank_slices, split, step_size


class StepCut:
    """How the next steps are cut; equal on all ranks but for ``rank``."""

    __slots__ = ("_sizes", "_slices", "batch_size", "drop_last", "micro_steps", "rank", "world_size")

    def __init__(self, *, batch_size: int, micro_steps: int, world_size: int, rank: int, drop_last: bool) -> None:
        self.batch_size = batch_size
        self.micro_steps = micro_steps
        self.world_size = world_size
        self.rank = rank
        self.drop_last = drop_last
        # By samples of the step: nearly all steps have as many.
        self._sizes: dict[int, list[list[int]]] = {}
        self._slices: dict[int, list[slice]] = {}

    def count(self, position: int, total: int) -> int:
        """Samples of the step at ``position``; 0 at the end."""
        return step_size(
            position=position,
            total=total,
            batch_size=max(self.batch_size, self.world_size),
            world_size=self.world_size,
            drop_last=self.drop_last,
        )

    def sizes(self, count: int) -> list[list[int]]:
        """Samples of each rank and micro-step; not to be changed."""
        if count not in self._sizes:
            self._sizes[count] = split(count, world_size=self.world_size, micro_steps=self.micro_steps).tolist()
        return self._sizes[count]

    def slices(self, count: int) -> list[slice]:
        """This rank's part of the step in each micro-step."""
        if count not in self._slices:
            self._slices[count] = rank_slices(
                count, rank=self.rank, world_size=self.world_size, micro_steps=self.micro_steps
            )
        return self._slices[count]


class _IndexFeed:
    """A batch sampler whose plan can be changed between two iterations of the DataLoader that it feeds."""

    def __init__(self, locality: bool) -> None:
        self._locality = locality
        self._order: Indices = np.empty(0, dtype=np.int64)
        self._position = 0
        self._cut: StepCut | None = None

    def plan(self, order: Indices, position: int, cut: StepCut) -> None:
        self._order, self._position, self._cut = order, position, cut

    def __iter__(self) -> Iterator[list[int]]:
        cut, position = self._cut, self._position
        if cut is None:
            return
        while count := cut.count(position, len(self._order)):
            step = self._order[position : position + count]
            if self._locality:
                step = np.sort(step)  # each rank then reads one stretch of the file
            for piece in cut.slices(count):
                yield step[piece].tolist()
            position += count


class MapFeed:
    """Batches of a map-style dataset through a DataLoader whose worker processes outlive every change."""

    def __init__(
        self, dataset: Any, order: EpochOrder, *, seed: int, num_workers: int, options: dict[str, Any]
    ) -> None:
        self._order = order
        self._seed = seed
        self._indices = _IndexFeed(bool(getattr(dataset, "locality", False)))
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._indices,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            **options,
        )
        self._epoch: tuple[int, Indices] | None = None
        self._batches: Iterator[Any] | None = None

    def indices(self, epoch: int) -> Indices:
        """The epoch's order."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._order.epoch_order(self._seed, epoch)
        return self._epoch[1]

    def warm_up(self) -> None:
        """Start the worker processes ahead of the first batch."""
        if self._loader.num_workers:
            self._indices.plan(
                np.empty(0, dtype=np.int64),
                0,
                StepCut(batch_size=1, micro_steps=1, world_size=1, rank=0, drop_last=False),
            )
            iter(self._loader)

    def begin(self, epoch: int, position: int, cut: StepCut) -> None:
        """(Re)start fetching at ``position``; what was fetched ahead under another plan is dropped."""
        self._indices.plan(self.indices(epoch), position, cut)
        self._batches = iter(self._loader)

    def step(self, epoch: int, position: int, cut: StepCut) -> tuple[int, int, list[Callable[[], Any]]]:
        """Samples of the next step (0 at the end), samples of the pass, and a function a micro-step's batch."""
        total = len(self.indices(epoch))
        count = cut.count(position, total)
        micro_steps = len(cut.sizes(count)[0]) if count else 0
        batches = self._batches
        assert batches is not None, "begin() comes first"
        return count, total, [lambda: next(batches)] * micro_steps

    def commit(self) -> None:
        """The step was used."""

    def can_switch(self, position: int, total: int, world_size: int) -> bool:
        """Whether a group of ``world_size`` may begin here."""
        return can_switch(position=position, total=total, world_size=world_size)


class StreamFeed:
    """Batches of an iterable dataset: every rank reads the stream and keeps its share (see ``StreamSharder``)."""

    def __init__(self, dataset: Any, *, seed: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        self._stream: StreamSharder[Any] | None = None
        self._epoch = -1

    def warm_up(self) -> None:
        """Nothing to start."""

    def begin(self, epoch: int, position: int, cut: StepCut) -> None:
        """Go to ``position`` of the epoch's stream."""
        if self._stream is None:
            self._stream = StreamSharder(self._dataset, seed=self._seed, epoch=epoch, position=position)
        elif epoch != self._epoch:
            self._stream.start_epoch(epoch, position=position)
        elif position != self._stream.position:
            self._stream.seek(position)
        self._epoch = epoch

    def step(self, epoch: int, position: int, cut: StepCut) -> tuple[int, int, list[Callable[[], Any]]]:
        """As :meth:`MapFeed.step`; the samples of the pass are those that are known to be there."""
        stream = self._stream
        assert stream is not None, "begin() comes first"
        drawn = stream.next_step(
            batch_size=max(cut.batch_size, cut.world_size),
            world_size=cut.world_size,
            rank=cut.rank,
            micro_steps=cut.micro_steps,
            drop_last=cut.drop_last,
        )
        if drawn is None:
            return 0, position, []
        total = stream.total if stream.total is not None else position + 2 * drawn.count
        return drawn.count, total, [functools.partial(self._collate, items) for items in drawn.items]

    def commit(self) -> None:
        """The step was used: its items are let go."""
        if self._stream is not None:
            self._stream.commit()

    def can_switch(self, position: int, total: int, world_size: int) -> bool:
        """Whether a group of ``world_size`` may begin here."""
        return self._stream is not None and self._stream.can_switch(world_size)


Feed = MapFeed | StreamFeed
