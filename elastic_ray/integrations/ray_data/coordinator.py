"""SHELL: the actor that executes a job's Ray Data datasets and tells workers which nodes store their rows.

Each job has one coordinator, on the head node. It only holds references: workers fetch the blocks themselves. Its
state is soft: if its process dies, Ray starts a new one, which executes the epoch again and skips the rows that the
group has used. It ends when the job has ended or the job's controller is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.cloudpickle
from ray.data import ExecutionResources, FileShuffleConfig, RandomSeedConfig
from ray.exceptions import ActorDiedError, RayError

from elastic_ray.integrations.ray_data.packing import PackedDatasets, forget, unpack
from elastic_ray.integrations.ray_data.row_window import Reader, Readers, RowSpan, RowWindow
from placement.ray_cluster.named_actors import create_on_head, find_actor
from placement.text import log_plainly

_AHEAD = 2  # blocks read beyond what readers want: the next ones are there when they ask


class StreamClosed(Exception):
    """Error raised if a stream is closed because it has no readers any more."""


class RowStream:
    """Rows of one epoch of a dataset, in order, read by a thread only as far as readers need them."""

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
        """Generation (number of the group of ranks) of the newest reader of the stream; -1 without readers."""
        return self._window.generation

    @property
    def floor(self) -> int:
        """Position before which rows have been released."""
        return self._window.floor

    @property
    def failed(self) -> bool:
        """True if reading the dataset has failed."""
        return self._error is not None

    @property
    def total(self) -> int | None:
        """Number of rows in the whole epoch; None until the epoch's end has been read."""
        return self._window.end if self._window.ended else None

    def want(self, reader: Reader, end: int) -> None:
        """Request rows up to ``end`` (exclusive) for a reader, and release the rows that no reader needs any more."""
        with self._lock:
            self._window.record(reader)
            self._wanted = max(self._wanted, end)
            self._lock.notify_all()

    def has(self, end: int) -> bool:
        """True if rows up to ``end``, or up to the end of the epoch, have been read."""
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
        """End the reading of the dataset; blocks of rows are released together with this object."""
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
    """Return the number of rows of a block."""
    rows = entry.metadata.num_rows
    if rows is None:
        raise RuntimeError("Ray Data did not report the number of rows of a block, which is needed to distribute rows")
    return int(rows)


def hold_order(dataset: Any, *, epoch: int, seed: int) -> None:
    """Fix the row order of the dataset's next execution, in place, as the order of ``epoch``; pass a copy.

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
    """Reserve the CPUs and GPUs in ``left`` for the job's workers, but leave at least one CPU to the dataset.

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


logger = logging.getLogger("elastic_ray.data")

_LOOK_S = 1.0
_ANSWER_S = 10.0
_SLOW_S = 30.0  # after which the wait for rows is explained
_POLL_S = 0.1
_TALKATIVE = {"ray._private.worker": "inside async actor", "ray.data._internal.progress": "Progress bars disabled"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowsWanted:
    """Request from a worker for the locations of rows."""

    dataset: str
    epoch: int  # which epoch's rows
    first: int  # the first row that it does not know yet
    end: int  # rows up to this one are to be reported, the last not included, as far as there are so many
    ahead: int  # rows up to this one it will ask for soon
    last_epoch: bool  # whether no epoch is known to follow
    reader: Reader  # who asks, and where it stands


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowsFound:
    """Locations of rows as ordered spans, and the epoch's total number of rows (None until fully read)."""

    spans: tuple[RowSpan, ...]
    total: int | None


def start_coordinator(
    name: str, packed: PackedDatasets, controller: Any, runtime_env: Mapping[str, Any] | None
) -> None:
    """Start a job's dataset coordinator: the actor that executes the job's datasets and locates their rows."""
    options = {"runtime_env": dict(runtime_env)} if runtime_env else {}
    create_on_head(DatasetCoordinator, name, packed, controller, max_restarts=-1, **options)


def find_coordinator(name: str, patience_s: float) -> Any:
    """Return the coordinator actor with this name, waiting up to ``patience_s`` [s] for it to start."""
    deadline_s = time.monotonic() + patience_s
    while (found := find_actor(name)) is None:
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"the process that reads the job's datasets ({name}) was not there within {patience_s:g} s"
            )
        time.sleep(_POLL_S)
    return found


class DatasetCoordinator:
    """Actor class of the dataset coordinator, which executes a job's datasets and locates rows for its workers.

    Its methods are coroutines on one event loop; each stream has its own thread.
    """

    def __init__(self, packed: PackedDatasets, controller: Any) -> None:
        log_plainly(logging.WARNING)
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        for name in _TALKATIVE:
            logging.getLogger(name).addFilter(_says_something)
        self._packed, self._controller = packed, controller
        self._datasets, self._error = _unpacked(packed)
        self._streams: dict[str, list[RowStream]] = {name: [] for name in self._datasets}
        self._readers = Readers()
        self._handle = ray.get_runtime_context().current_actor
        self._loop = asyncio.get_event_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._main = self._loop.create_task(self._watch())

    async def describe(self, dataset: str) -> int | None:
        """Return the number of rows per epoch if Ray Data knows it without reading the data, otherwise None."""
        if self._error:
            raise RuntimeError(self._error)
        if dataset not in self._datasets:
            raise KeyError(f"no dataset named {dataset!r}; the job has {sorted(self._datasets)}")
        theirs = ray.cloudpickle.loads(self._datasets[dataset])
        rows = await asyncio.to_thread(theirs._meta_count)
        return None if rows is None else int(rows)

    async def rows(self, wanted: RowsWanted) -> RowsFound:
        """Wait until the wanted rows have been read, and return their locations."""
        stream = self._stream_for(wanted)
        while not await self._has(stream, wanted):
            if not self._readers.is_latest(wanted.reader):
                return RowsFound(spans=(), total=None)
            stream = self._stream_for(wanted)
        later = any(each.epoch == wanted.epoch + 1 for each in self._streams[wanted.dataset])
        if stream.total is not None and not wanted.last_epoch and not later:
            self._start(wanted.dataset, wanted.epoch + 1, 0)  # its first rows are ready when this epoch has been read
        spans = stream.spans(wanted.first, max(wanted.end, wanted.ahead))
        return RowsFound(spans=spans, total=stream.total)

    async def _has(self, stream: RowStream, wanted: RowsWanted) -> bool:
        """Wait until a stream has the requested rows; False if it was closed or has already released the first row.

        Raises Exception if the dataset could not be read. The stream is then closed, so that a repeated request (for
        example from a rerun of the job) starts a new execution.
        """
        try:
            while not stream.has(wanted.end):
                if not await self._news() and not stream.has(wanted.end):
                    logger.warning(await asyncio.to_thread(_slow, wanted.dataset))
        except StreamClosed:
            return False
        except Exception:
            self._close(stream)
            raise
        return stream.floor <= wanted.first

    async def _news(self) -> bool:
        """Wait for progress in any stream; return False if none is made within ``_SLOW_S`` seconds."""
        news = self._loop.create_future()
        self._waiting.add(news)
        try:
            done, _ = await asyncio.wait({news}, timeout=_SLOW_S)
        finally:
            self._waiting.discard(news)
        return bool(done)

    async def leave(self, client: str) -> None:
        """Remove the reader with id ``client``, which has finished its pass and needs no more rows."""
        stream = self._readers.leave(client)
        if isinstance(stream, RowStream) and stream.leave(client):
            self._close(stream)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for news in waiting:
            if not news.done():
                news.set_result(None)

    def _stream_for(self, wanted: RowsWanted) -> RowStream:
        """Assign the reader to a stream that still has the rows, starting one if needed, and return the stream."""
        reader, streams = wanted.reader, self._streams[wanted.dataset]
        for each in [each for each in streams if each.failed and each.generation < 0 and each.epoch == wanted.epoch]:
            self._close(each)  # it was begun before anybody needed it, and that it could not be read concerns nobody
        fitting = [each for each in streams if each.epoch == wanted.epoch and each.floor <= wanted.first]
        if fitting:
            stream = max(fitting, key=lambda each: each.floor)
        else:
            for each in [each for each in streams if self._is_stale(each, wanted)]:
                self._close(each, readers_gone=True)
            slack = wanted.end - wanted.first  # another rank may stand a step behind
            floor = max(0, min(wanted.first, reader.position) - slack)
            stream = self._start(wanted.dataset, wanted.epoch, floor)
        before = self._readers.record(reader, stream)
        if isinstance(before, RowStream) and before.leave(reader.client):
            self._close(before)
        stream.want(reader, max(wanted.end, wanted.ahead))
        return stream

    def _is_stale(self, stream: RowStream, wanted: RowsWanted) -> bool:
        """True if the stream will not be read again, because its readers are gone or its epoch was skipped."""
        if stream.generation < 0:
            return stream.epoch < wanted.epoch
        return stream.generation < wanted.reader.generation and not self._readers.has_others(stream, wanted.reader)

    def _start(self, dataset: str, epoch: int, floor: int) -> RowStream:
        """Start an execution of a dataset for one epoch."""
        stream = RowStream(
            self._datasets[dataset],
            epoch=epoch,
            seed=self._packed.seed,
            left=self._packed.left,
            floor=floor,
            changed=self._changed,
        )
        self._streams[dataset].append(stream)
        return stream

    def _changed(self) -> None:
        """Wake waiting calls after progress; called from a stream's thread, which may outlive the event loop."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                self._loop.call_soon_threadsafe(self._wake)

    def _close(self, stream: RowStream, *, readers_gone: bool = False) -> None:
        """End an execution; waiting requests move to another one, or are dropped if ``readers_gone``."""
        stream.close()
        for streams in self._streams.values():
            if stream in streams:
                streams.remove(stream)
        self._readers.discard(stream, gone=readers_gone)
        self._wake()

    async def _watch(self) -> None:
        """Wait for the job to end, then clean up and end this actor."""
        while not await self._is_over():
            await asyncio.sleep(_LOOK_S)
        for streams in tuple(self._streams.values()):
            for stream in tuple(streams):
                self._close(stream, readers_gone=True)
        await asyncio.sleep(_POLL_S)  # executions that end give back what they have
        await asyncio.to_thread(forget, self._packed)
        ray.kill(self._handle)

    async def _is_over(self) -> bool:
        """True if the job has ended or its controller is dead."""

        async def phase() -> Any:
            return (await self._controller.status.remote()).phase

        try:
            return bool((await asyncio.wait_for(phase(), _ANSWER_S)).ended)
        except ActorDiedError:
            return True
        except (RayError, asyncio.TimeoutError):  # it may be on its way back
            return False


def _unpacked(packed: PackedDatasets) -> tuple[dict[str, bytes], str]:
    """Return the unpacked datasets and an error message (empty on success), to be raised at the first request."""
    try:
        return unpack(packed), ""
    except Exception as error:
        return {}, (
            f"the job's datasets could not be unpacked on the head node: {type(error).__name__}: {error}. Modules that "
            "their functions come from must be there too: RunConfig(worker_runtime_env) takes them along"
        )


def _says_something(record: logging.LogRecord) -> bool:
    """True unless Ray logs the record for every such actor; used to filter these records out."""
    return _TALKATIVE[record.name] not in record.getMessage()


def _slow(dataset: str) -> str:
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    return (
        f"dataset {dataset!r}: no rows for {_SLOW_S:g} s; {free:g} CPUs of the cluster are free. Ray Data's tasks need "
        "CPUs beside those of the workers: leave some (fewer workers at most in ScalingConfig(num_workers), or fewer "
        "CPUs in resources_per_worker), or let reading need none (ray_remote_args={'num_cpus': 0})"
    )
