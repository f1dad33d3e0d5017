"""SHELL: stores jobs' measurements as Parquet files beside the jobs' results.

In ``<storage_path>/.elastic_ray/knowledge/<writer>.parquet``, every allocator (one per cluster) writes its own file
under each storage path that its jobs use, with its knowledge of those jobs' models. It reads all files in that
directory before it decides about the first of these jobs. So

- *no update is lost*: no two writers share a file, and a file is only ever replaced by one that knows more;
- *a reader sees a complete file or none*: a local file gets its name by a rename, which is atomic; on object
  stores a file appears when its upload is complete. Files that are damaged nevertheless, or foreign, are logged
  and skipped;
- *any file system of pyarrow works*: nothing is locked, and nothing is appended to.

Files of allocators that no longer exist are folded in: once a file is an hour old, an allocator deletes it if it has
read the file, still knows all its contents and has written them itself. A running writer loses nothing by this, since
it writes all it knows with its next change.

Rows are measurements (``step``), gradient noise, lengths of jobs or strategies; columns of other kinds are null.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import math
import operator
import posixpath
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.json
import pyarrow.parquet as pq

from placement.cluster.jobs import FoundStrategy, JobView
from placement.goodput.fitting import Observation
from placement.goodput.model import NoiseScale
from placement.knowledge.knowledge import Knowledge, KnowledgeConfig
from placement.knowledge.records import (
    Batches,
    KnownLength,
    KnownNoise,
    KnownStep,
    KnownStrategy,
    Measurements,
    covers,
    merged,
)
from placement.storage.private_files import make_directory, open_output
from placement.storage.storage_calls import StorageCalls
from placement.text import first_line

logger = logging.getLogger("placement.allocator")

FOLDER = ".elastic_ray/knowledge"
_FOLD_AFTER_S = 3600.0
_FORMAT = {b"elastic_ray": b"knowledge 1"}
_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),  # ``step``, ``noise``, ``length`` or ``strategy``
        pa.field("fingerprint", pa.string(), nullable=False),  # of the model, see ``elastic_ray.record.fingerprint``
        pa.field("gpu_type", pa.string(), nullable=False),  # label ``ray.io/accelerator-type``; empty without
        pa.field("seen_s", pa.float64(), nullable=False),  # time of the measurement [s since the epoch]
        # step
        ("machines", pa.list_(pa.string())),  # kinds of nodes, such as ``8 CPU 4 GPU``; void once all are gone
        ("nodes", pa.int64()),  # number of nodes with workers
        ("replicas", pa.int64()),  # workers
        ("atomic_bsz", pa.float64()),  # samples per worker and micro-step
        ("accum_steps", pa.int64()),  # micro-steps before the one that synchronises
        ("step_time_s", pa.float64()),  # one optimizer step, synchronisation included [s]
        ("grad_time_s", pa.float64()),  # one micro-step without synchronisation [s]; 0 if not measured
        ("weight", pa.float64()),  # number of steps that the measurement is a mean of
        # noise
        ("epoch", pa.int64()),  # epochs that the job had finished
        ("noise_sqr", pa.float64()),  # squared norm of the gradient
        ("noise_var", pa.float64()),  # variance of a gradient at the initial batch, same unit as ``noise_sqr``
        ("init_batch_size", pa.int64()),  # initial global batch of the job [samples]
        ("max_batch_size", pa.int64()),  # largest global batch allowed [samples]; null: fixed batch
        ("atomic_bsz_least", pa.int64()),  # fewest samples per worker and micro-step allowed; null: no bound
        ("atomic_bsz_most", pa.int64()),  # most of them; null: no bound
        ("accumulation", pa.bool_()),  # true if several micro-steps are allowed
        # length
        ("samples", pa.float64()),  # total progress, in samples at the initial batch
        ("part", pa.float64()),  # fraction of the length that the job first declared; null: none declared
        ("declarer", pa.string()),  # user or tenant who declared it
        # strategy
        ("form", pa.string()),  # backend and nodes of the group's ranks
        ("strategy", pa.string()),  # its name; ``step_time_s`` as for a step
    ],
    metadata=_FORMAT,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageRoot:
    """Storage root: the directory that contains jobs' run directories."""

    path: str  # of the directory on ``filesystem``
    filesystem: Any  # a ``pyarrow.fs.FileSystem``, picklable
    private: bool = True  # whether what is kept there is for its user only

    @property
    def key(self) -> tuple[str, str]:
        """Key that identifies the storage root; equal for objects with the same root."""
        return str(self.filesystem.type_name), self.path


class KnowledgeStore:
    """Knowledge files under one storage root; calls block, so an event loop runs them in a thread."""

    def __init__(self, root: StorageRoot, writer: str) -> None:
        self._files = root.filesystem
        self._private = root.private
        self._folder = posixpath.join(root.path, FOLDER)
        self._own = posixpath.join(self._folder, f"{writer}.parquet")
        self._others: dict[str, Measurements] = {}

    def load(self) -> Measurements:
        """Load all writers' measurements; damaged and foreign files are logged and skipped."""
        selector = pyarrow.fs.FileSelector(self._folder, allow_not_found=True)
        kept: list[Measurements] = []
        for entry in self._files.get_file_info(selector):
            if not entry.is_file or not entry.base_name.endswith(".parquet"):
                continue
            measurements = self._read(entry.path)
            if measurements is None:
                continue
            kept.append(measurements)
            path = posixpath.join(self._folder, entry.base_name)
            if path != self._own:
                self._others[path] = measurements
        return merged(kept)

    def save(self, measurements: Measurements) -> None:
        """Replace this writer's file, and delete old files of other writers whose contents it includes."""
        make_directory(self._files, self._folder, private=self._private)
        table = _table(measurements)
        if isinstance(self._files, pyarrow.fs.LocalFileSystem):
            part = f"{self._own}.part"  # one writer, one name: what a crash leaves is overwritten
            with open_output(self._files, part, private=self._private) as stream:
                pq.write_table(table, stream)
            self._files.move(part, self._own)
        else:
            with self._files.open_output_stream(self._own) as stream:
                pq.write_table(table, stream)
        self._fold_in(measurements)

    def _fold_in(self, measurements: Measurements) -> None:
        """Delete other writers' files that are an hour old, unchanged since read, and covered by ``measurements``."""
        since_s = time.time() - KnowledgeConfig().forget_s
        for path, theirs in list(self._others.items()):
            if not covers(measurements, theirs, since_s):
                continue  # it knows of other models, or other machines
            info = self._files.get_file_info(path)
            if info.mtime is None or time.time() - info.mtime.timestamp() < _FOLD_AFTER_S:
                continue
            del self._others[path]
            if self._read(path) == theirs:  # not written to since
                with contextlib.suppress(FileNotFoundError):
                    self._files.delete_file(path)

    def _read(self, path: str) -> Measurements | None:
        """Read one writer's file; None if it is gone, or if it is damaged or foreign, which is logged."""
        try:
            with self._files.open_input_file(path) as file:
                table = pq.ParquetFile(file).read()  # read_table() would import pandas: 40 MB
            if (table.schema.metadata or {}).get(b"elastic_ray") != _FORMAT[b"elastic_ray"]:
                raise ValueError(f"its metadata does not say elastic_ray={_FORMAT[b'elastic_ray'].decode()!r}")
            return _measurements(table)
        except FileNotFoundError:  # folded in by another writer meanwhile
            return None
        except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
            logger.warning(
                "what jobs have measured cannot be read from %s, and is left out: %s", path, first_line(error)
            )
            return None


# Of each kind of row the class of its records, and the column of each field, or of each field of a value in one.
_OWN = {"fingerprint": "fingerprint", "seen_s": "seen_s"}
_OF_TYPE = {**_OWN, "gpu_type": "gpu_type"}
_KINDS: Mapping[str, tuple[type[Any], Mapping[str, str]]] = {
    "step": (
        KnownStep,
        {
            **_OF_TYPE,
            "machines": "machines",
            **{f"observation.{name}": name for name in ("nodes", "replicas", "atomic_bsz", "accum_steps")},
            "observation.step_time": "step_time_s",
            "observation.grad_time": "grad_time_s",
            "observation.count": "weight",
        },
    ),
    "noise": (
        KnownNoise,
        {
            **_OF_TYPE,
            "epoch": "epoch",
            "noise.sqr": "noise_sqr",
            "noise.var": "noise_var",
            **{f"batches.{name}": name for name in ("init_batch_size", "max_batch_size", "accumulation")},
            "batches.atomic_bsz_range": "atomic_bsz_range",  # two columns
        },
    ),
    "length": (KnownLength, {**_OWN, "samples": "samples", "part": "part", "declarer": "declarer"}),
    "strategy": (KnownStrategy, {**_OWN, "form": "form", "found.name": "strategy", "found.step_s": "step_time_s"}),
}
_PARTS = {"observation": Observation, "noise": NoiseScale, "batches": Batches, "found": FoundStrategy}


def _table(measurements: Measurements) -> pa.Table:
    """Return the measurements as rows of ``_SCHEMA``, grouped by kind."""
    several = (measurements.steps, measurements.noises, measurements.lengths, measurements.strategies)
    rows = [_row(kind, each) for kind, records in zip(_KINDS, several, strict=True) for each in records]
    if not rows:
        return _SCHEMA.empty_table()
    # Table.from_pylist() would import pandas, 40 MB, only to see that this is none of its own.
    table = pyarrow.json.read_json(
        pa.BufferReader("\n".join(json.dumps(row) for row in rows).encode()),
        read_options=pyarrow.json.ReadOptions(use_threads=False),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="error"),
    )
    return table.cast(_SCHEMA)


def _row(kind: str, record: object) -> dict[str, Any]:
    """Return a record as a row of the file; columns of other kinds are omitted and become null."""
    said = {column: operator.attrgetter(path)(record) for path, column in _KINDS[kind][1].items()}
    if kind == "step":
        said["machines"] = sorted(said["machines"])
    elif kind == "noise":
        said["atomic_bsz_least"], said["atomic_bsz_most"] = said.pop("atomic_bsz_range") or (None, None)
    return {"kind": kind, "gpu_type": "", **said}


def _measurements(table: pa.Table) -> Measurements:
    """Return the measurements in the rows."""
    rows = table.select(_SCHEMA.names).to_pylist()
    steps, noises, lengths, strategies = (
        tuple(_record(kind, row) for row in rows if row["kind"] == kind) for kind in _KINDS
    )
    return Measurements(steps=steps, noises=noises, lengths=lengths, strategies=strategies)


def _record(kind: str, row: dict[str, Any]) -> Any:
    """Return the record in a row of this kind; raise TypeError or ValueError if a value is out of range.

    An atomic range is None if either bound is missing.
    """
    bounds = row["atomic_bsz_least"], row["atomic_bsz_most"]
    if kind == "step":
        row["machines"] = frozenset(row["machines"])
    elif kind == "length":
        samples, part = row["samples"], row["part"]
        if not 0 < samples < math.inf or not (part is None or 0 < part < math.inf):
            raise ValueError(
                f"a length must be above 0 and finite, but is {samples} samples, {part} of what was declared"
            )
    row |= {"atomic_bsz_range": None if None in bounds else bounds, "declarer": row["declarer"] or ""}
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for path, column in _KINDS[kind][1].items():
        name, _, inner = path.partition(".")
        if inner:
            parts.setdefault(name, {})[inner] = row[column]
        else:
            own[name] = row[column]
    return _KINDS[kind][0](**own, **{name: _PARTS[name](**fields) for name, fields in parts.items()})


_EVERY_S = 10.0
_CALL_TIMEOUT_S = 60.0
_SAVE_TIMEOUT_S = 5.0  # of who waits for all that is known to be written; it still is, later
_LOAD_TIMEOUT_S = 3.0  # a slow file system must not keep a job waiting: it then hears of it later


class _SyncedRoot:
    """Storage root for some jobs, with its store and the state of reading from it and writing to it."""

    def __init__(
        self, root: StorageRoot, knowledge: Knowledge, writer: str, recall: Callable[[Measurements], None]
    ) -> None:
        self._path, self._knowledge, self._recall = root.path, knowledge, recall
        self._store = KnowledgeStore(root, writer)
        self._calls = StorageCalls(root.path, threads=1)  # of its own: one that hangs holds up no other
        self._fingerprints: set[str] = set()
        self._version, self._saved_s, self._hurry, self._saving = 0, 0.0, False, False
        self.loading = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        """Load the measurements stored under the root; a failure is logged."""
        what = "reading what jobs have measured"
        try:
            measurements = await self._calls.run(what, self._store.load, timeout_s=_CALL_TIMEOUT_S)
        except Exception as error:  # a job trains without it all the same
            logger.warning("what earlier jobs have measured cannot be read from %s: %s", self._path, error)
            return
        self.know(each.fingerprint for each in measurements.steps)
        self.know(each.fingerprint for each in measurements.strategies)
        self._recall(measurements)

    def know(self, fingerprints: Iterable[str]) -> None:
        """Record that jobs of these models use the root."""
        self._fingerprints.update(fingerprints)

    def hurry_up(self) -> None:
        """Request a write at the next opportunity, because the job's cluster may soon be gone."""
        self._hurry = True

    def is_due(self, *, now: bool) -> bool:
        """True if changes must be written now; the root is then marked as being written."""
        if self._knowledge.version == self._version:
            self._hurry = False
            return False
        due = now or self._hurry or time.monotonic() - self._saved_s >= _EVERY_S
        if not due or self._saving or not self.loading.done():
            return False
        self._saving = True
        return True

    async def save(self) -> None:
        """Write the knowledge about the root's models; a failure is logged, and the write is tried again later."""
        version, measurements = self._knowledge.version, self._knowledge.measurements(self._fingerprints, time.time())
        self._hurry, self._saved_s = False, time.monotonic()
        try:
            if measurements.steps or measurements.strategies:
                save = functools.partial(self._store.save, measurements)
                await self._calls.run("writing what jobs have measured", save, timeout_s=_CALL_TIMEOUT_S)
            self._version = version
        except Exception as error:  # the next round tries again
            logger.warning("what jobs have measured cannot be written to %s: %s", self._path, error)
        finally:
            self._saving = False


class KnowledgeSync:
    """Synchronisation of knowledge with storage: loads a storage root with its first job, and writes changes to it."""

    def __init__(self, knowledge: Knowledge, writer: str, recall: Callable[[Measurements], None]) -> None:
        self._knowledge, self._writer, self._recall = knowledge, writer, recall
        self._roots: dict[tuple[str, str], _SyncedRoot] = {}
        self._root_of_job: dict[str, _SyncedRoot] = {}
        self._saves: set[asyncio.Task[None]] = set()

    def knows(self, job: str) -> bool:
        """True if ``open`` has been called with the storage root (results directory) of this job."""
        return job in self._root_of_job

    async def open(self, job: str, root: StorageRoot) -> None:
        """Open a job's storage root, and wait for its contents to load, up to a short timeout."""
        if root.key not in self._roots:
            self._roots[root.key] = _SyncedRoot(root, self._knowledge, self._writer, self._recall)
        known = self._root_of_job[job] = self._roots[root.key]
        await asyncio.wait([known.loading], timeout=_LOAD_TIMEOUT_S)

    def heard(self, view: JobView) -> None:
        """Record the fingerprint of the model that the job trains, so that its measurements are stored."""
        if view.fingerprint is not None and view.job in self._root_of_job:
            self._root_of_job[view.job].know([view.fingerprint])

    def ended(self, job: str) -> None:
        """Record a job's end, so that the next :meth:`save` writes its measurements: the cluster may soon be gone."""
        root = self._root_of_job.pop(job, None)
        if root is not None:
            root.hurry_up()

    async def save(self, *, now: bool = False) -> None:
        """Write changes to each storage root that is due; with ``now``, write all unsaved changes and wait briefly."""
        for root in self._roots.values():
            if root.is_due(now=now):
                task = asyncio.get_running_loop().create_task(root.save())
                self._saves.add(task)
                task.add_done_callback(self._saves.discard)
        if now and self._saves:
            await asyncio.wait(self._saves, timeout=_SAVE_TIMEOUT_S)
