"""SHELL over Ray Data: one ordered execution of a dataset, read by a thread only as far as its readers need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.cloudpickle
from ray.data import ExecutionResources, FileShuffleConfig, RandomSeedConfig

from elastic_ray.integrations.ray_data.row_window import Reader, RowSpan, RowWindow

logger = logging.getLogger("elastic_ray.data")
_AHEAD = 2  # blocks read beyond what readers want: the next ones are there when they ask


class StreamClosed(Exception):
    """Error raised if a stream is closed because it has no more readers."""


class RowStream:
    """One epoch's rows of a dataset, in order, read by a thread only as far as readers need them."""

    def __init__(
        self,
        packed: bytes,
        *,
        epoch: int,
        seed: int,
        left: Mapping[str, float],
        floor: int,
        changed: Callable[[], object],
    ) -> None:
        self.epoch = epoch
        self._seed, self._left = seed, left
        self._packed, self._changed = packed, changed
        self._window = RowWindow(floor)
        self._wanted = 0
        self._executor: Any = None
        self._error: Exception | None = None
        self._closed = False
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"ray data, epoch {epoch}", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        """Generation (number of the group of ranks) of the stream's newest reader; -1 without readers."""
        return self._window.generation

    @property
    def floor(self) -> int:
        """Position of the first row that has not been released."""
        return self._window.floor

    @property
    def failed(self) -> bool:
        """True if reading the dataset has failed."""
        return self._error is not None

    @property
    def total(self) -> int | None:
        """Number of rows in the entire epoch; None until the epoch has been fully read."""
        return self._window.end if self._window.ended else None

    def want(self, reader: Reader, end: int) -> None:
        """Request rows up to ``end`` (exclusive) for a reader, and release rows that no reader needs any longer."""
        with self._lock:
            self._window.record(reader)
            self._wanted = max(self._wanted, end)
            self._lock.notify_all()

    def has(self, end: int) -> bool:
        """True if all rows before ``end``, or the entire epoch, have been read."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StreamClosed
            return self._window.ended or self._window.end >= end

    def spans(self, first: int, end: int) -> tuple[RowSpan, ...]:
        """Return the spans (runs of rows in one block) that contain any row from ``first`` to ``end`` (exclusive)."""
        with self._lock:
            return self._window.spans(first, end)

    def leave(self, client: str) -> bool:
        """Mark the reader of ``client`` as finished; return True if all readers are finished."""
        with self._lock:
            return self._window.leave(client)

    def close(self) -> None:
        """Stop reading the dataset; blocks of rows are released with this object."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
        executor = self._executor
        if executor is not None:
            threading.Thread(target=executor.shutdown, args=(True,), daemon=True).start()

    def _run(self) -> None:
        """Read until the epoch ends or the stream is closed; runs in the stream's thread."""
        try:
            self._read()
        except Exception as error:
            with self._lock:
                if not self._closed:
                    self._error = error
        finally:
            if self._closed and self._executor is not None:
                self._executor.shutdown(True)  # it may have come after the stream was closed
        self._changed()

    def _read(self) -> None:
        """Add the execution's blocks to the window, pausing whenever enough blocks are ahead of the readers."""
        theirs: Any = ray.cloudpickle.loads(self._packed)
        hold_order(theirs, epoch=self.epoch, seed=self._seed)
        leave_room(theirs, self._left)
        bundles, _, self._executor = theirs._execute_to_iterator()
        for bundle in bundles:
            for entry, piece in zip(bundle.blocks, bundle.slices, strict=True):
                first, end = (0, _rows(entry)) if piece is None else (piece.start_offset, piece.end_offset)
                with self._lock:
                    self._window.add(end - first, entry.ref, first)
            self._changed()
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._window.ahead(self._wanted) < _AHEAD)
                if self._closed:
                    return
        with self._lock:
            self._window.finish()


def _rows(entry: Any) -> int:
    """Return the number of rows in a block."""
    rows = entry.metadata.num_rows
    if rows is None:
        raise RuntimeError("Ray Data did not report the number of rows of a block, which is needed to distribute rows")
    return int(rows)


def hold_order(dataset: Any, *, epoch: int, seed: int) -> None:
    """Fix the row order of the dataset's next execution, in place, as the order for ``epoch``; pass a copy.

    Ray Data counts a dataset's executions, and seeded shuffles depend on that count, which is set to the epoch here.
    Shuffles without a seed get ``seed``. Random numbers drawn in user functions are not controlled.
    """
    for operator in dataset._logical_plan.dag.post_order_iter():
        _seed_operator(operator, seed)
    theirs = dataset.context
    theirs._execution_idx = epoch
    theirs.enable_progress_bars = False
    theirs = theirs.execution_options
    theirs.preserve_order = True


def leave_room(dataset: Any, left: Mapping[str, float]) -> None:
    """Reserve the CPUs and GPUs in ``left`` for the job's workers, but leave at least one CPU for the dataset.

    Otherwise Ray Data's tasks would use every free CPU, and the job could not grow. Resources that the user has already
    excluded stay excluded.
    """
    theirs: Any = dataset.context.execution_options
    there: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cpus = max(0.0, min(left.get("CPU", 0.0), there.get("CPU", 0.0) - 1.0))
    room = ExecutionResources(cpu=cpus, gpu=left.get("GPU", 0.0))
    theirs._set_exclude_resources(theirs.exclude_resources.add(room))


def _seed_operator(operator: Any, seed: int) -> None:
    """Set the seed of an operator in Ray Data's plan if it shuffles or samples without one."""
    theirs: Any
    for theirs in (getattr(operator, "seed_config", None), *(getattr(operator, "fn_args", None) or ())):
        if isinstance(theirs, RandomSeedConfig) and theirs.seed is None:
            theirs.seed, theirs.reseed_after_execution = seed, True
    make = getattr(operator, "shuffle_config_factory", None)
    made: list[Any] = [make(), make()] if make is not None else [None]  # shuffle="files" makes a new seed each time
    if made[0] is not None and (made[0].seed is None or made[0].seed != made[1].seed):
        object.__setattr__(operator, "shuffle_config_factory", lambda: FileShuffleConfig(seed=seed))
    theirs = getattr(operator, "datasource", None)
    shuffle = getattr(theirs, "_shuffle", None)
    if shuffle == "files" or (isinstance(shuffle, FileShuffleConfig) and shuffle.seed is None):
        theirs._shuffle = FileShuffleConfig(seed=seed)
