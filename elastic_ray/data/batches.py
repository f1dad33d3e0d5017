"""SHELL over torch's DataLoader: fetches one rank's batches, regardless of group changes during a pass."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import DataLoader, default_collate

from elastic_ray.batch.halving import Halving
from elastic_ray.data.arguments import LoaderArguments
from elastic_ray.data.compared_items import item_facts
from elastic_ray.data.epochs import EpochBatch, FollowsEpochs, WorkerInit
from elastic_ray.data.order import EpochOrder, StreamSharder, check_indices, digest
from elastic_ray.data.private_random import PrivateRandom
from elastic_ray.data.sharding import (
    Indices,
    Order,
    Shares,
    batch_ends,
    can_switch,
    rank_slices,
    split,
    step_size,
    whole_step,
)
from elastic_ray.state.progress import BITS, sample_hashes

_SHOWN = 4  # of an order, in errors
# Indices of some steps are computed together: for so few as one has, NumPy's calls cost more than the work.
_STEPS_AHEAD, _INDICES_AHEAD = 64, 4096
_CHUNK = 1 << 20


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class StepSplit:
    """Division of upcoming steps between ranks; the same on all ranks except for ``rank`` and ``shard``."""

    batch_size: int
    micro_steps: int
    world_size: int
    rank: int
    drop_last: bool  # a last step smaller than the batch is dropped
    shares: Shares | None = None  # weights for an unequal division among the ranks; None divides equally
    # selects the steps that a lone rank splits into two halves to measure gradient noise; None for none
    halving: Halving | None = None
    least: int = 1  # fewest samples in a rank's micro-batch, if the step has enough samples for all ranks
    owed: int = 0  # size of the first step if the model already contains its update but its commit was lost; else 0
    # most samples in a rank's micro-batch, for the owed step, whose size is of a larger batch; None for no bound
    most: int | None = None
    shard: int = 0  # index of the part of the rank's samples that this worker reads, if a unit's workers divide them
    shards: int = 1  # number of equal parts into which the rank's samples are divided
    _first: tuple[int, int] = dataclasses.field(init=False, default=(-1, 0))  # position, and committed steps there
    # By samples and micro-steps of the step: nearly all steps have as many.
    _sizes: dict[tuple[int, int], list[list[int]]] = dataclasses.field(init=False, default_factory=dict)
    _slices: dict[tuple[int, int], list[slice]] = dataclasses.field(init=False, default_factory=dict)

    def start(self, position: int, steps: int) -> None:
        """Record that ``steps`` steps are committed when the pass has used ``position`` samples; count from there."""
        if self._first[0] >= 0:  # of another pass, or after a nested one
            self.owed = 0
        self._first = position, steps

    def step_at(self, position: int) -> int:
        """Return the number of steps that will have been committed when the pass reaches ``position``."""
        begin, steps = self._first
        return steps + (position - begin) // max(self.batch_size, 1)

    def micro_steps_at(self, position: int, count: int) -> int:
        """Return the number of micro-batches per rank in the step of ``count`` samples at ``position``."""
        if self.most is not None and self.owed_at(position):
            return max(self.micro_steps, -(-count // (self.world_size * self.most)))
        if self.halving is None or self.micro_steps > 1:
            return self.micro_steps
        return 2 if self.halving.due(self.step_at(position), count) else 1

    def count(self, position: int, total: int) -> int:
        """Return the size of the step at ``position`` in a pass of ``total`` samples, over all ranks; 0 at the end.

        If the step has fewer samples than ranks, some ranks get none.
        """
        if self.owed and position == self._first[0]:
            return self.owed
        each = self.shards
        least = self.world_size * each
        if self.batch_size >= least and position <= total - self.batch_size - 2 * least:
            return self.batch_size  # no step near the end, as nearly all
        return each * step_size(
            position=position // each,
            total=total // each,
            batch_size=max(self.batch_size // each, self.world_size),
            world_size=self.world_size,
            drop_last=self.drop_last,
            least=self.least,
        )

    def owed_at(self, position: int) -> int:
        """Return the size of the step at ``position`` if the model already holds its update; 0 if it does not."""
        return self.owed if position == self._first[0] else 0

    def sizes(self, count: int, position: int) -> list[list[int]]:
        """Return ``sizes[rank][micro]``, which divide the ``count`` samples of the step at ``position``; read-only."""
        key = count, self.micro_steps_at(position, count)
        if key not in self._sizes:
            parts = split(
                count // self.shards,
                world_size=self.world_size,
                micro_steps=key[1],
                shares=self.shares,
                least=self.least,
            )
            self._sizes[key] = (parts * self.shards).tolist()
        return self._sizes[key]

    def slices(self, count: int, position: int) -> list[slice]:
        """Return this rank's slices of the step's ``count`` samples, one per micro-step; empty if it has none."""
        key = count, self.micro_steps_at(position, count)
        if key not in self._slices:
            self._slices[key] = self.slices_of(self.rank, count, key[1])
        return self._slices[key]

    def slices_of(self, rank: int, count: int, micro_steps: int) -> list[slice]:
        """Return the slices of a step's ``count`` samples that `rank` uses, one per micro-step."""
        found = rank_slices(
            count // self.shards,
            rank=rank,
            world_size=self.world_size,
            micro_steps=micro_steps,
            shares=self.shares,
            least=self.least,
        )
        return [slice(each.start * self.shards, each.stop * self.shards) for each in found]

    def steps_to_come(self, position: int, total: int, most: int) -> list[int]:
        """Return the sizes of the next steps, at most ``most``, from ``position`` in a pass of ``total`` samples."""
        return [len(step) for step in itertools.islice(_steps(position, total, self), most)]

    def own(self, indices: list[int]) -> list[int]:
        """Return the part of the rank's ``indices`` that this worker reads: all, unless its unit divides them."""
        size = len(indices) // self.shards
        return indices if self.shards == 1 else indices[self.shard * size : (self.shard + 1) * size]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """Next step of a pass: sizes of all ranks' micro-batches, and functions that fetch this rank's micro-batches."""

    total: int  # samples of the pass, as far as they are known
    # ``sizes[rank][micro]`` samples of each rank's micro-batches; no rank at all at the end of the pass
    sizes: Sequence[Sequence[int]] = ()
    # a function for each of this rank's micro-batches; none where it has no sample
    fetches: Sequence[Callable[[], Any]] = ()
    to_come: Callable[[int], Sequence[int]] | None = None  # as ``LoaderStep.to_come``
    sample_tag: int = 0  # of a sample that all ranks have read for it; 0 where each reads its own only
    hashed: Callable[[], int] | None = None  # as ``LoaderStep.hashed``


class BatchSource(Protocol):
    """Protocol of an object that supplies one rank's batches to a loader."""

    def start(self, epoch: int, position: int, cut: StepSplit, *, new_pass: bool) -> None:
        """Start or restart at ``position`` of the epoch, for a new pass or after the group or batch changed.

        Args:
            new_pass: True at the start of a pass, False if the current pass is continued.
        """

    def end(self) -> None:
        """End the current pass over the data."""

    def close(self) -> None:
        """Close the source when the run ends."""

    def step(self, epoch: int, position: int, cut: StepSplit) -> StepBatches:
        """Return the step at ``position``, divided between ranks by ``cut``; called again if the step was voided."""

    def commit(self) -> None:
        """Mark the samples of the current step as used."""

    def facts(self, epoch: int) -> Mapping[str, Any]:
        """Return values, keyed by name, that ranks compare: if they are equal, each sample is used exactly once."""

    def can_switch(self, position: int, total: int, world_size: int) -> bool:
        """True if a group of ``world_size`` ranks can continue at ``position`` of a pass with ``total`` samples."""


@runtime_checkable
class BringsBatches(Protocol):
    """Protocol of an iterable dataset that divides its samples between the ranks itself."""

    known_rows: int | None  # samples of an epoch; None where they are not known

    def batch_source(self, collate: Callable[[Any], Any] | None) -> BatchSource:
        """Return the source of the dataset's batches, which applies the user's ``collate_fn``, if any."""


class _PlannedBatches:
    """A batch sampler whose plan can be replaced between two iterations of its DataLoader."""

    def __init__(self, *, tells_epochs: bool) -> None:
        self._plan: Callable[[], Iterator[tuple[int, list[int]]]] = lambda: iter(())
        self._epoch = 0
        self._tells_epochs = tells_epochs

    def plan(self, epoch: int, batches: Callable[[], Iterator[tuple[int, list[int]]]]) -> None:
        """Set the batches to draw from now on; ``batches`` yields each batch with the position of its first sample."""
        self._epoch, self._plan = epoch, batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch
        if self._tells_epochs:
            return (EpochBatch(epoch, first, batch) for first, batch in self._plan())
        return (batch for _, batch in self._plan())


class MapBatches:
    """Batches of a map-style dataset, loaded by a DataLoader whose worker processes survive resizes within a pass.

    The dataset's length may change between passes.
    """

    def __init__(self, given: LoaderArguments, make_order: Callable[[], EpochOrder], *, seed: int) -> None:
        self._given, self._dataset = given, given.dataset
        self._length = len(self._dataset)
        self._make_order = make_order
        self._order = make_order()
        self._seed = seed
        self._locality = bool(getattr(self._dataset, "locality", False))
        self._indices = _PlannedBatches(tells_epochs=given.num_workers > 0)
        self._keeps_workers = given.persistent_workers or not given.num_workers
        self._make = functools.partial(_data_loader, given, self._indices, seed)
        self._loader: DataLoader[Any] | None = self._make()  # here, for the errors of its arguments
        self._epoch: tuple[int, Order] | None = None
        self._total = 0  # samples of the pass
        self._digest: tuple[Order, int] | None = None
        self._batches: Iterator[Any] | None = None
        self._hashes: dict[int, int] = {}  # of the indices of each micro-batch, by the position of its first sample
        self._firsts: Sequence[int] = ()  # positions of those of the present step

    def indices(self, epoch: int) -> Order:
        """Return the epoch's order of sample indices."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._order.epoch_order(self._seed, epoch)
        return self._epoch[1]

    def start(self, epoch: int, position: int, cut: StepSplit, *, new_pass: bool) -> None:
        """Start or restart fetching at ``position``; batches that were prefetched under an earlier plan are dropped."""
        if new_pass:
            self.end()
            if len(self._dataset) != self._length:
                self._length, self._order, self._epoch = len(self._dataset), self._make_order(), None
        self._total = len(self.indices(epoch))
        self._hashes = {}
        self._indices.plan(epoch, self._plan(epoch, position, cut))
        if self._loader is None:
            self._loader = self._make()
        self._batches = iter(self._loader)

    def close(self) -> None:
        """Close the source when the run ends, which ends its worker processes."""
        self._batches = self._loader = None

    def end(self) -> None:
        """End the pass over the data; DataLoader worker processes end too, unless they persist between passes."""
        self._batches = None
        if not self._keeps_workers:
            self._loader = None

    def _plan(self, epoch: int, position: int, cut: StepSplit) -> Callable[[], Iterator[tuple[int, list[int]]]]:
        # Not a method of this object, which the DataLoader would then hold, and its worker processes would outlive it.
        return functools.partial(_shares, self.indices(epoch), position, cut, self._hashes, sort=self._locality)

    def step(self, epoch: int, position: int, cut: StepSplit) -> StepBatches:
        """Return the step at ``position`` of the epoch's order, divided between ranks by ``cut``."""
        total = self._total
        count = cut.count(position, total)
        if not count:
            return StepBatches(total=total)
        slices = cut.slices(count, position)
        self._firsts = [position + each.start for each in slices]
        return StepBatches(
            total=total,
            sizes=cut.sizes(count, position),
            fetches=[self.fetch] * len(slices),
            hashed=functools.partial(_sum_of, self._hashes, self._firsts),
            to_come=functools.partial(cut.steps_to_come, position, total),
        )

    def pass_over(self, epoch: int, position: int, cut: StepSplit) -> None:
        """Skip this rank's part of the step at ``position``, because another rank runs it."""
        self.start(epoch, position + cut.count(position, self._total), cut, new_pass=False)

    def step_of(self, rank: int, number: int, epoch: int, position: int, cut: StepSplit) -> StepBatches:
        """Return `rank`'s part of a later step, ``number`` steps after the step at ``position``."""
        place = next(itertools.islice(_steps(position, self._total, cut), number, None))
        count, micro_steps = len(place), len(cut.sizes(len(place), place.start)[0])
        indices = self.indices(epoch)[place.start : place.stop]
        if self._locality:
            indices = np.sort(indices)
        parts = [(place.start + part.start, indices[part]) for part in cut.slices_of(rank, count, micro_steps)]
        sizes = list(cut.sizes(count, place.start))
        sizes[cut.rank] = sizes[rank]
        return StepBatches(
            total=self._total,
            sizes=sizes,
            fetches=[functools.partial(self._load, EpochBatch(epoch, at, part.tolist())) for at, part in parts],
            hashed=functools.partial(int, sum(int(sample_hashes(part).sum()) for _, part in parts) & BITS),
        )

    def _load(self, batch: EpochBatch) -> Any:
        """Load a batch in this process, without prefetching."""
        assert self._loader is not None, "start() comes first"
        assert not self._loader.num_workers, "samples of other ranks are loaded without worker processes only"
        dataset = self._loader.dataset
        whole = getattr(dataset, "__getitems__", None)
        return self._loader.collate_fn(whole(batch) if whole else [dataset[index] for index in batch])

    def hash_of_rest(self, epoch: int, position: int) -> int:
        """Return the summed hashes of all sample indices from ``position`` on in the epoch's order."""
        order = self.indices(epoch)
        pieces = (order[begin : begin + _CHUNK] for begin in range(position, len(order), _CHUNK))
        return sum(int(sample_hashes(piece).sum()) for piece in pieces) & BITS

    def fetch(self) -> Any:
        """Return this rank's next batch, waiting for the DataLoader."""
        assert self._batches is not None, "start() comes first"
        return next(self._batches)

    def commit(self) -> None:
        """Mark the samples of the current step as used."""
        for first in self._firsts:
            self._hashes.pop(first, None)

    def facts(self, epoch: int) -> Mapping[str, Any]:
        """Return values that ranks compare: the dataset's length, the epoch's order, and facts about the items."""
        order = self.indices(epoch)
        if self._digest is None or self._digest[0] is not order:  # a nested loop asks in each of the steps around it
            self._digest = order, digest(order)
        begins = [*order[:_SHOWN].tolist(), f"{self._digest[1]:016x}"]
        return {"len(dataset)": len(self._dataset), **item_facts(self._dataset), f"the order of epoch {epoch}": begins}

    def can_switch(self, position: int, total: int, world_size: int) -> bool:
        """True if a group of ``world_size`` ranks can continue at ``position`` of a pass with ``total`` samples."""
        return can_switch(position=position, total=total, world_size=world_size)


def _sum_of(hashes: Mapping[int, int], firsts: Sequence[int]) -> int:
    """Return the summed hashes, modulo 2^32, of the micro-batches that start at the given positions."""
    return sum(map(hashes.__getitem__, firsts)) & BITS


def _shares(
    order: Order, position: int, cut: StepSplit, hashes: dict[int, int], *, sort: bool
) -> Iterator[tuple[int, list[int]]]:
    """Yield this rank's micro-batches from ``position``, each with the position of its first sample.

    With ``sort``, the indices of each step are sorted, so that each rank reads one contiguous part of the file.
    """
    steps = _steps(position, len(order), cut)
    size = cut.batch_size if sort else cut.batch_size // cut.world_size
    while ahead := list(itertools.islice(steps, min(_STEPS_AHEAD, _INDICES_AHEAD // max(size, 1) + 1))):
        first, last = ahead[0].start, ahead[-1].stop
        pieces = [
            range(step.start + piece.start, step.start + piece.stop)
            for step in ahead
            for piece in cut.slices(len(step), step.start)
        ]
        own = np.concatenate([np.arange(piece.start, piece.stop, dtype=np.int64) for piece in [range(0), *pieces]])
        if sort:
            whole = np.split(order[first:last], [step.stop - first for step in ahead])
            indices = np.concatenate([np.sort(step) for step in whole])[own - first]
        else:
            indices = order[own]
        values = iter(indices.tolist())
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), sample_hashes(indices).cumsum()]).tolist()
        end = 0
        for piece in pieces:
            begin, end = end, end + len(piece)
            hashes[piece.start] = (sums[end] - sums[begin]) & BITS
        for piece in pieces:
            yield piece.start, cut.own(list(itertools.islice(values, len(piece))))


def _steps(position: int, total: int, cut: StepSplit) -> Iterator[range]:
    """Yield the positions of each step."""
    while count := cut.count(position, total):
        yield range(position, position + count)
        position += count


def _data_loader(given: LoaderArguments, indices: _PlannedBatches, seed: int) -> DataLoader[Any]:
    """Build a DataLoader whose workers persist within a pass, so that a resize does not fork them again.

    A sample's random numbers depend only on the seed, the epoch and the sample's position; see ``seed_sample``.
    """
    dataset, options, workers = given.dataset, dict(given.options), given.num_workers
    if workers:
        options["worker_init_fn"] = WorkerInit(options.get("worker_init_fn"))
        dataset = FollowsEpochs(dataset, sets_epoch=given.persistent_workers, seed=seed)
    return DataLoader(dataset, batch_sampler=indices, num_workers=workers, persistent_workers=workers > 0, **options)


class StreamBatches:
    """Batches of an iterable dataset; every rank reads the full stream and keeps its share (see ``StreamSharder``)."""

    def __init__(self, dataset: Any, *, seed: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._seed = dataset, seed
        self._collate = collate or default_collate
        self._stream: StreamSharder[Any] | None = None
        self._epoch = -1

    def start(self, epoch: int, position: int, cut: StepSplit, *, new_pass: bool) -> None:
        """Open the epoch's stream, or continue it, at ``position``."""
        if self._stream is None:
            self._stream = StreamSharder(self._dataset, seed=self._seed, epoch=epoch, position=position)
        elif epoch != self._epoch:
            self._stream.start_epoch(epoch, position=position)
        elif position != self._stream.position:
            self._stream.seek(position)
        self._epoch = epoch

    def end(self) -> None:
        """Do nothing, because a stream needs no cleanup when a pass ends."""

    def close(self) -> None:
        """Do nothing, because the stream is read in this process."""

    def step(self, epoch: int, position: int, cut: StepSplit) -> StepBatches:
        """Return the stream's next step, divided by ``cut``; its ``total`` counts only the samples read so far."""
        stream = self._stream
        assert stream is not None, "start() comes first"
        drawn = stream.next_step(
            batch_size=max(cut.batch_size, cut.world_size),
            world_size=cut.world_size,
            rank=cut.rank,
            micro_steps=functools.partial(cut.micro_steps_at, position),
            drop_last=cut.drop_last,
            shares=cut.shares,
            least=cut.least,
            owed=cut.owed_at(position),
        )
        if drawn is None:
            return StepBatches(total=position)
        total = stream.total if stream.total is not None else position + 2 * drawn.count
        fetches = [functools.partial(self._collate, items) for items in drawn.items]
        return StepBatches(total=total, sizes=cut.sizes(drawn.count, position), fetches=fetches, sample_tag=drawn.tag)

    def commit(self) -> None:
        """Mark the step's items as used, and release them."""
        if self._stream is not None:
            self._stream.commit()

    def facts(self, epoch: int) -> Mapping[str, Any]:
        """Return no facts, because items are compared while they are read; see ``StepBatches.sample_tag``."""
        return {}

    def can_switch(self, position: int, total: int, world_size: int) -> bool:
        """True if a group of ``world_size`` ranks can continue at the stream's current position."""
        return self._stream is not None and self._stream.can_switch(world_size)


class BatchSamplerOrder:
    """Sample order given by a batch sampler, with the positions where its batches end.

    The sampler is read once per epoch. All random generators that it can use are seeded from the seed and the epoch
    (see ``SamplerOrder``), so that it gives the same batches on every rank.
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
        """Return the sample indices of an epoch's batches, in order, and set ``ends``, the end positions of batches.

        Raises ValueError if the sampler yields no batches, too many or an empty one, or an index is outside the
        dataset.
        """
        for told in (self._batch_sampler, getattr(self._batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(told, "set_epoch", None)):
                set_epoch(epoch)
        with PrivateRandom(seed=seed, epoch=epoch, owner=self._batch_sampler):
            limit = max(100 * self._samples, 10_000_000)
            drawn = itertools.islice(self._batch_sampler, limit + 1)
            batches = [np.asarray(batch, dtype=np.int64) for batch in drawn]
        if len(batches) > limit:
            raise ValueError(f"a batch_sampler must end, but gave more than {limit} batches")
        if not batches or not all(len(batch) for batch in batches):
            raise ValueError("a batch_sampler must yield at least one batch and no empty batch")
        order = np.concatenate(batches)
        check_indices(order, self._samples, self._batch_sampler)
        self.ends = np.cumsum([len(batch) for batch in batches]).tolist()
        return order


class WholeBatches(MapBatches):
    """Source that gives each rank one undivided batch per step; in the last step some ranks may get none."""

    def __init__(
        self, given: LoaderArguments, make_order: Callable[[], EpochOrder], *, seed: int, drop_last: bool
    ) -> None:
        super().__init__(given, make_order, seed=seed)
        self._drop_last = drop_last
        self._ends: tuple[Order, Sequence[int]] | None = None

    def ends(self, epoch: int) -> Sequence[int]:
        """Return the positions where the epoch's batches end."""
        order = self.indices(epoch)
        if self._ends is None or self._ends[0] is not order:
            if isinstance(self._order, BatchSamplerOrder):
                ends = self._order.ends
            else:
                ends = batch_ends(len(order), self._given.batch_size, drop_last=self._drop_last)
            self._ends = order, ends
        return self._ends[1]

    def _plan(self, epoch: int, position: int, cut: StepSplit) -> Callable[[], Iterator[tuple[int, list[int]]]]:
        return functools.partial(_own_batches, self.indices(epoch), self.ends(epoch), position, cut)

    def step(self, epoch: int, position: int, cut: StepSplit) -> StepBatches:
        """Return the step at ``position``, which gives one batch to each rank while batches remain."""
        ends = self.ends(epoch)
        batches = whole_step(ends, position=position, world_size=cut.world_size)
        if not batches:
            return StepBatches(total=ends[-1] if ends else 0)
        counts = [last - first for first, last in batches] + [0] * (cut.world_size - len(batches))
        fetches = [self.fetch] if cut.rank < len(batches) else []
        return StepBatches(total=ends[-1], sizes=[[count] for count in counts], fetches=fetches)

    def facts(self, epoch: int) -> Mapping[str, Any]:
        """Return the values that ``MapBatches`` compares between ranks, and a digest of where the batches end."""
        ends = np.asarray(self.ends(epoch), dtype=np.int64)
        return {**super().facts(epoch), "the batches' ends": f"{digest(ends):016x}"}

    def can_switch(self, position: int, total: int, world_size: int) -> bool:
        """Return True, because a group of any size can continue after a complete batch."""
        return True


def _own_batches(order: Order, ends: Sequence[int], position: int, cut: StepSplit) -> Iterator[tuple[int, list[int]]]:
    """Yield this rank's batches from ``position``, each with the position of its first sample."""
    while batches := whole_step(ends, position=position, world_size=cut.world_size):
        if cut.rank < len(batches):
            first, last = batches[cut.rank]
            yield first, order[first:last].tolist()
        position = batches[-1][1]
