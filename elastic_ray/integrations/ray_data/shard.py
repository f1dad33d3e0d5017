"""SHELL over Ray Data: ``get_dataset_shard``, which gives a train function access to the job's datasets."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
from ray.data.block import BlockAccessor
from ray.data.collate_fn import ArrowBatchCollateFn, PandasBatchCollateFn
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError
from torch.utils.data import IterableDataset

from elastic_ray.data.batches import StepBatches, StepSplit
from elastic_ray.data.sharding import can_switch
from elastic_ray.integrations.ray_data.coordinator import RowsFound, RowsWanted, find_coordinator
from elastic_ray.integrations.ray_data.packing import datasets_of_thread
from elastic_ray.integrations.ray_data.row_window import Reader, RowSpan
from elastic_ray.loop.api import current_session, get_context
from elastic_ray.run.current import session_of_thread
from placement.ray_cluster.named_actors import insist

_PATIENCE_S = 60.0
_DESCRIBE_S = 180.0  # of files, Ray Data reads some metadata
_OF_RAY = ("iter_batches", "iter_rows", "iter_tf_batches", "iter_torch_batches", "materialize", "to_tf", "to_torch")
logger = logging.getLogger(__name__)
_SLOW_S = 60.0  # between warnings; the coordinator's log says more, and sooner
_WAITS = (
    "no rows of dataset {dataset!r} from {row} on for {seconds:.0f} s: its tasks may lack CPUs, or what it reads is "
    "slow; the dataset coordinator's log says which"
)
_STEPS_AHEAD = 3  # places of rows are known for so many steps
_TRIES = 20
_PAUSE_S = 0.25


def get_dataset_shard(dataset_name: str = "train") -> RayDataShard:
    """Return a dataset of ``ElasticTrainer(datasets={...})``, to be read with an ``AdaptiveDataLoader``.

    In each epoch, all workers read one ordered execution of the dataset. The loader assigns rows by position: each row
    is used once per epoch, however workers join, leave and fail. ``docs/data.md`` describes the order and restarts.

    Args:
        dataset_name: Key of the dataset in ``datasets``.

    Raises:
        KeyError: The job has no dataset with this name.
        RuntimeError: Called outside the train function of a job with datasets, or the coordinator does not respond.
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
            f"the process that reads the job's datasets did not find out within {_DESCRIBE_S:g} s how many "
            f"rows {dataset_name!r} has: can the head node read its source?"
        ) from None
    return RayDataShard(dataset_name, coordinator, rows, run.token)


class RayDataShard(IterableDataset[Any]):
    """Dataset of the job for ``AdaptiveDataLoader(shard, batch_size)``; created by :func:`get_dataset_shard`.

    Attributes:
        name: Key of the dataset in ``ElasticTrainer(datasets=...)``.
        known_rows: Number of rows per epoch, if Ray Data knows it without reading the data. If None, the loader has no
            length.
    """

    def __init__(self, name: str, coordinator: Any, known_rows: int | None, run: str) -> None:
        self.name, self.known_rows = name, known_rows
        self._coordinator, self._run = coordinator, run

    def batch_source(self, collate: Callable[[Any], Any] | None) -> RayDataBatches:
        """Return the source that supplies batches to a loader over this dataset.

        Args:
            collate: Function that makes a batch, like Ray Data's ``collate_fn``. Its argument is a dict of NumPy arrays
                keyed by column, or a table for ``ray.data.collate_fn.ArrowBatchCollateFn`` and
                ``PandasBatchCollateFn``.
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
    """Return an error message that explains why no datasets are available."""
    session = session_of_thread()
    if session is not None and session.elastic and ray.is_initialized():
        return f"the job has no datasets: pass ElasticTrainer(..., datasets={{{name!r}: ray.data.read_parquet(...)}})"
    return (
        "get_dataset_shard() is for the train function of an ElasticTrainer(..., datasets={...}): without a trainer, "
        "and under torchrun, nothing reads a Ray dataset for the group. Use elastic_ray.data.arrow.ArrowDataset for "
        "Parquet files, or ds.iter_torch_batches() in a single process"
    )


class RayDataBatches:
    """Source of one rank's batches from one dataset (see ``elastic_ray.data.batches.BatchSource``)."""

    def __init__(
        self, dataset: str, coordinator: Any, *, known_rows: int | None, collate: Callable[[Any], Any] | None, run: str
    ) -> None:
        self._dataset, self._coordinator, self._collate = dataset, coordinator, collate
        self._known_rows = known_rows
        self._client, self._run = secrets.token_hex(8), run
        self._epoch, self._last_epoch = -1, True
        self._rank, self._world_size, self._generation = 0, 1, 0
        self._discard(0)

    def _discard(self, position: int) -> None:
        """Discard all known rows, and continue from ``position``."""
        self._position = self._end = position
        self._spans: deque[RowSpan] = deque()
        self._blocks: dict[int, Any] = {}
        self._total: int | None = None
        self._asked: Any = None

    def start(self, epoch: int, position: int, cut: StepSplit, *, new_pass: bool) -> None:
        """Start or continue reading at ``position`` of the epoch, with this rank's share given by ``cut``."""
        self._generation = get_context().get_generation()
        self._last_epoch = epoch + 1 >= (current_session().progress.epochs or 0)
        self._rank, self._world_size = cut.rank, cut.world_size
        if new_pass or epoch != self._epoch or position < self._position:
            self._discard(position)
        self._epoch = epoch

    def end(self) -> None:
        """End the pass over the data, and notify the coordinator that this reader needs no more rows."""
        self._discard(0)
        self._epoch = -1
        self._coordinator.leave.remote(self._client)

    def close(self) -> None:
        """Do nothing when the run ends, because the coordinator ends with the job."""

    def step(self, epoch: int, position: int, cut: StepSplit) -> StepBatches:
        """Return the step at ``position``; its ``total`` is an estimate until the epoch's length is known."""
        within = current_session().ledger.round
        self._advance(position if within is None else within.position)  # a round may be drawn again as a whole
        batch_size = max(cut.batch_size, cut.world_size, cut.owed_at(position))
        reach = batch_size + 2 * cut.world_size  # what the size of a step may depend on
        self._know(position + reach, ahead=position + _STEPS_AHEAD * reach)
        count = cut.count(position, min(self._end, position + reach) if self._total is None else self._total)
        if not count:
            if self._end == 0:
                raise ValueError(f"a dataset must have at least 1 row, but {self._dataset!r} has none")
            return StepBatches(total=position)
        total = self._total
        if total is None:
            total = max(self._known_rows or 0, position + 2 * count)
        fetches = [
            functools.partial(self._batch, position + piece.start, position + piece.stop)
            for piece in cut.slices(count, position)
        ]
        return StepBatches(total=total, sizes=cut.sizes(count, position), fetches=fetches)

    def commit(self) -> None:
        """Do nothing, because the next step's request reports the position to the coordinator."""

    def facts(self, epoch: int) -> Mapping[str, Any]:
        """Return the dataset's name, which ranks compare; the coordinator determines the rows and their order."""
        return {"the dataset of Ray Data": self._dataset}

    def can_switch(self, position: int, total: int, world_size: int) -> bool:
        """True if enough rows remain after ``position`` for a group of ``world_size`` ranks to start there."""
        self._know(position + 2 * world_size, ahead=0)
        known = self._end if self._total is None else self._total
        return can_switch(position=position, total=known, world_size=world_size)

    def _advance(self, position: int) -> None:
        """Advance to ``position`` and release the rows before it."""
        if position < self._position:
            self._discard(position)
        self._position = position
        while self._spans and self._spans[0].end <= position:
            self._blocks.pop(self._spans.popleft().first, None)

    def _know(self, end: int, *, ahead: int) -> None:
        """Locate the rows up to ``end`` or the epoch's end, and request the rows up to ``ahead`` in the background."""
        while self._total is None and self._end < end:
            call = self._asked if self._asked is not None else self._ask(end, ahead)
            self._asked = None
            self._receive(self._answer(call, end, ahead))
        if self._total is None and self._end < ahead and self._asked is None:
            self._asked = self._ask(self._end + 1, ahead)

    def _ask(self, end: int, ahead: int) -> Any:
        """Send a request to the coordinator without waiting for the answer."""
        return self._coordinator.rows.remote(
            RowsWanted(
                dataset=self._dataset,
                epoch=self._epoch,
                first=self._end,
                end=end,
                ahead=ahead,
                last_epoch=self._last_epoch,
                reader=Reader(
                    client=self._client,
                    run=self._run,
                    generation=self._generation,
                    world_size=self._world_size,
                    rank=self._rank,
                    position=self._position,
                ),
            )
        )

    def _answer(self, call: Any, end: int, ahead: int) -> RowsFound:
        """Return the answer to a request, without a timeout; repeat the request if Ray restarted the coordinator."""
        asked_s = time.monotonic()
        while not ray.wait([call], timeout=_SLOW_S)[0]:
            current_session().notify(
                "warning", _WAITS.format(dataset=self._dataset, row=self._end, seconds=time.monotonic() - asked_s)
            )
            logger.warning("rank %d waits for rows of dataset %r", self._rank, self._dataset)
        try:
            found: RowsFound = ray.get(call)
        except RayActorError:
            found = insist(lambda: self._ask(end, ahead), timeout_s=None)
        return found

    def _receive(self, found: RowsFound) -> None:
        """Add newly located rows, and start fetching blocks that are not on this node."""
        fresh = []
        for span in found.spans:
            rest = span.behind(self._end)  # another execution may have cut other blocks
            if rest is not None:
                fresh.append(rest)
                self._end = rest.end
        self._spans.extend(fresh)
        if fresh:
            ray.wait([span.block for span in fresh], num_returns=len(fresh), timeout=0, fetch_local=True)
        if found.total is not None and self._end >= found.total:
            self._total = found.total

    def _batch(self, first: int, end: int) -> Any:
        """Return the batch of rows ``first`` to ``end`` (exclusive), locating the rows again if blocks were lost."""
        for attempt in range(_TRIES):
            try:
                pieces = self._pieces(first, end)
                break
            except ObjectLostError:  # with the coordinator, or with a node: another execution has them again
                if attempt + 1 == _TRIES:
                    raise
                time.sleep(_PAUSE_S)
                self._discard(self._position)
                self._know(end, ahead=0)
        return to_batch(pieces, self._collate)

    def _pieces(self, first: int, end: int) -> Sequence[Any]:
        """Return tables with rows ``first`` to ``end`` (exclusive), in order."""
        found = []
        for span in self._spans:
            if span.end > first and span.first < end:
                if span.first not in self._blocks:
                    self._blocks[span.first] = ray.get(span.block)
                low, high = max(first, span.first), min(end, span.end)
                shift = span.offset - span.first
                found.append(cut(self._blocks[span.first], low + shift, high + shift))
        return found


def cut(block: Any, first: int, end: int) -> Any:
    """Return rows ``first`` to ``end`` (exclusive) of a block as an Arrow table that shares the block's memory."""
    accessor = BlockAccessor.for_block(block)
    table = block if isinstance(block, pa.Table) else accessor.to_arrow()
    return table.slice(first, end - first)


def to_batch(pieces: Sequence[Any], collate: Callable[[Any], Any] | None) -> Any:
    """Return one batch made from the rows of the given tables."""
    table = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces, promote_options="default")
    if isinstance(collate, ArrowBatchCollateFn):
        return collate(table)
    if isinstance(collate, PandasBatchCollateFn):
        return collate(BlockAccessor.for_block(table).to_pandas())
    if collate is not None:
        return collate(BlockAccessor.for_block(table).to_numpy())
    return {name: _column(table, name) for name in table.column_names}


def _column(table: Any, name: str) -> Any:
    """Convert a column of an Arrow table as :func:`tensor` does; lists of equal length are converted in bulk."""
    column = table.column(name)
    chunks = [_matrix(chunk) for chunk in column.chunks if len(chunk)]
    if chunks and all(chunk is not None and chunk.shape[1] == chunks[0].shape[1] for chunk in chunks):
        return torch.from_numpy(np.concatenate(chunks))  # a copy, also of a single one
    values: Any = BlockAccessor.for_block(table).to_numpy(name)
    return tensor(values)


def _matrix(chunk: Any) -> Any:
    """Return number lists of equal length as an array [rows, length], or None for any other data."""
    kind = chunk.type
    if not (pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    if chunk.null_count or not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return None
    numbers = chunk.flatten()
    if not pa.types.is_fixed_size_list(kind) and len(np.unique(np.diff(chunk.offsets))) > 1:
        return None
    return None if numbers.null_count else numbers.to_numpy().reshape(len(chunk), -1)


def tensor(values: np.ndarray[Any, Any]) -> Any:
    """Return a column as a tensor [rows, ...]; values without a torch dtype (text, bytes, times, nulls) as a list."""
    if values.dtype == object and len(values) and all(isinstance(each, np.ndarray) for each in values):
        shapes = {each.shape for each in values}
        if len(shapes) > 1:
            return [tensor(each) for each in values]
        values = np.stack(list(values))
    if values.dtype.kind not in "biufc":
        return values.tolist()
    return torch.from_numpy(np.array(values))  # a copy: what Arrow holds is not to be written
