"""SHELL: measurements of jobs, kept as Parquet files beside their results.

``<storage_path>/.elastic_ray/knowledge/<writer>.parquet``: every allocator (one per cluster) writes a file of its own
under each storage path that its jobs use, with what it knows of those jobs' models, and reads all files there before
it decides about the first of these jobs. So

- *no update is lost*: no two writers share a file, and a file is only ever replaced by one that knows more;
- *a reader sees a whole file or none*: a local file gets its name by a rename, which is atomic; on object stores a file
  appears when its upload is complete; what is torn nevertheless, or is not ours, is reported and left out;
- *any file system of pyarrow serves*: nothing is locked, and nothing is appended to.

Files of allocators that are gone are folded in: an allocator that has read one, still knows all that it says and has
written that itself deletes it, once it is an hour old. A living writer loses nothing by that: it writes all it knows
with its next news.

Columns, one row per measurement (kind ``step``), gradient noise (``noise``), length of a job (``length``) or fastest
strategy (``strategy``); others' are null:

======================  ==========  ===================================================================================
``kind``                string      ``step``, ``noise``, ``length`` or ``strategy``
``fingerprint``         string      which model, see ``elastic_ray.record.fingerprint``
``gpu_type``            string      of the nodes, Ray's label ``ray.io/accelerator-type``; empty without
``seen_s``              float64     when it was measured [s since the epoch]
``machines``            list        kinds of nodes of that type in the cluster, such as ``8 CPU 4 GPU``; where none of
                        (string)    them is there any more, the row no longer counts
``nodes``               int64       step: nodes that the workers lay on
``replicas``            int64       step: workers
``atomic_bsz``          float64     step: samples per worker and micro-step
``accum_steps``         int64       step: micro-steps before the one that synchronises
``step_time_s``         float64     step: one optimizer step, synchronisation included [s]
``grad_time_s``         float64     step: one micro-step without synchronisation [s], 0 if not measured
``weight``              float64     step: of the measurement, by how many steps it is a mean of
``epoch``               int64       noise: epochs that the job had finished
``noise_sqr``           float64     noise: squared norm of the gradient
``noise_var``           float64     noise: variance of a gradient at the initial batch, same unit as ``noise_sqr``
``init_batch_size``     int64       noise: global batch that the job began with [samples]
``max_batch_size``      int64       noise: largest global batch that it allowed [samples], null = it was fixed
``atomic_bsz_least``    int64       noise: least samples per worker and micro-step that it allowed, null = no bound
``atomic_bsz_most``     int64       noise: most, likewise
``accumulation``        bool        noise: whether it allowed several micro-steps
``samples``             float64     length: progress in all, in samples at the initial batch
``part``                float64     length: of the length that the job had declared, null = it had declared none
``declarer``            string      length: who had declared it
``form``                string      strategy: backend and nodes of the group's ranks
``strategy``            string      strategy: its name; ``step_time_s`` as of ``step``
======================  ==========  ===================================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import posixpath
import time
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.json
import pyarrow.parquet as pq

from placement.cluster.jobs import FoundStrategy
from placement.goodput.fitting import Observation
from placement.goodput.model import NoiseScale
from placement.knowledge.knowledge import KnowledgeConfig
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

logger = logging.getLogger("placement.allocator")

FOLDER = ".elastic_ray/knowledge"
_FOLD_AFTER_S = 3600.0
_FORMAT = {b"elastic_ray": b"knowledge 1"}
_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("gpu_type", pa.string(), nullable=False),
        pa.field("seen_s", pa.float64(), nullable=False),
        ("machines", pa.list_(pa.string())),
        ("nodes", pa.int64()),
        ("replicas", pa.int64()),
        ("atomic_bsz", pa.float64()),
        ("accum_steps", pa.int64()),
        ("step_time_s", pa.float64()),
        ("grad_time_s", pa.float64()),
        ("weight", pa.float64()),
        ("epoch", pa.int64()),
        ("noise_sqr", pa.float64()),
        ("noise_var", pa.float64()),
        ("init_batch_size", pa.int64()),
        ("max_batch_size", pa.int64()),
        ("atomic_bsz_least", pa.int64()),
        ("atomic_bsz_most", pa.int64()),
        ("accumulation", pa.bool_()),
        ("samples", pa.float64()),
        ("part", pa.float64()),
        ("declarer", pa.string()),
        ("form", pa.string()),
        ("strategy", pa.string()),
    ],
    metadata=_FORMAT,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageRoot:
    """Storage root of a cluster's jobs: the parent of their runs' directories."""

    path: str  # of the directory on ``filesystem``
    filesystem: Any  # a ``pyarrow.fs.FileSystem``, picklable
    private: bool = True  # whether what is kept there is for its user only

    @property
    def key(self) -> tuple[str, str]:
        """Key that tells two storage roots apart."""
        return str(self.filesystem.type_name), self.path


class KnowledgeStore:
    """The files under one storage root. Calls block on the file system: an event loop runs them in a thread.

    Args:
        root: where.
        writer: name of this writer's own file, unique among all that share the root.
    """

    def __init__(self, root: StorageRoot, writer: str) -> None:
        self._files = root.filesystem
        self._private = root.private
        self._folder = posixpath.join(root.path, FOLDER)
        self._own = posixpath.join(self._folder, f"{writer}.parquet")
        self._others: dict[str, Measurements] = {}

    def load(self) -> Measurements:
        """Load the measurements of all writers; torn and foreign files are reported and left out."""
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
        """Replace this writer's file, and fold in what others have left behind.

        Raises OSError: the file system refuses.
        """
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
        """Delete others' files that these measurements cover, if an hour old and unchanged since they were read."""
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
        """Read one writer's file; None if it is gone, or is torn or foreign, which is logged."""
        try:
            with self._files.open_input_file(path) as file:
                table = pq.ParquetFile(file).read()  # read_table() would import pandas: 40 MB
            if (table.schema.metadata or {}).get(b"elastic_ray") != _FORMAT[b"elastic_ray"]:
                raise ValueError(f"its metadata does not say elastic_ray={_FORMAT[b'elastic_ray'].decode()!r}")
            return _measurements(table)
        except FileNotFoundError:  # folded in by another writer meanwhile
            return None
        except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            logger.warning("what jobs have measured cannot be read from %s, and is left out: %s", path, reason)
            return None


def _table(measurements: Measurements) -> pa.Table:
    """Return the measurements as rows of ``_SCHEMA``, steps before noises."""
    rows = [_step_row(step) for step in measurements.steps] + [_noise_row(noise) for noise in measurements.noises]
    rows += [_length_row(length) for length in measurements.lengths]
    rows += [_strategy_row(each) for each in measurements.strategies]
    if not rows:
        return _SCHEMA.empty_table()
    # Table.from_pylist() would import pandas, 40 MB, only to see that this is none of its own.
    table = pyarrow.json.read_json(
        pa.BufferReader("\n".join(json.dumps(row) for row in rows).encode()),
        read_options=pyarrow.json.ReadOptions(use_threads=False),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="error"),
    )
    return table.cast(_SCHEMA)


def _step_row(step: KnownStep) -> dict[str, Any]:
    """Return a measured step time as a row of the file; columns of noises are left out and become null."""
    seen = step.observation
    return {
        "kind": "step",
        "fingerprint": step.fingerprint,
        "gpu_type": step.gpu_type,
        "seen_s": step.seen_s,
        "machines": sorted(step.machines),
        "nodes": seen.nodes,
        "replicas": seen.replicas,
        "atomic_bsz": seen.atomic_bsz,
        "accum_steps": seen.accum_steps,
        "step_time_s": seen.step_time,
        "grad_time_s": seen.grad_time,
        "weight": seen.count,
    }


def _noise_row(known: KnownNoise) -> dict[str, Any]:
    """Return a noise scale, with the limits of its job's batch, as a row of the file; None where there is no limit."""
    batches = known.batches
    least, most = batches.atomic_bsz_range or (None, None)
    return {
        "kind": "noise",
        "fingerprint": known.fingerprint,
        "gpu_type": known.gpu_type,
        "seen_s": known.seen_s,
        "epoch": known.epoch,
        "noise_sqr": known.noise.sqr,
        "noise_var": known.noise.var,
        "init_batch_size": batches.init_batch_size,
        "max_batch_size": batches.max_batch_size,
        "atomic_bsz_least": least,
        "atomic_bsz_most": most,
        "accumulation": batches.accumulation,
    }


def _length_row(length: KnownLength) -> dict[str, Any]:
    return {"kind": "length", "gpu_type": "", **dataclasses.asdict(length)}


def _strategy_row(known: KnownStrategy) -> dict[str, Any]:
    """Return the winner of a race as a row of the file."""
    return {
        "kind": "strategy",
        "fingerprint": known.fingerprint,
        "gpu_type": "",
        "seen_s": known.seen_s,
        "form": known.form,
        "strategy": known.found.name,
        "step_time_s": known.found.step_s,
    }


def _strategy(row: dict[str, Any]) -> KnownStrategy:
    """Return the strategy in a row of its kind; raises TypeError or ValueError where a value is out of range."""
    found = FoundStrategy(name=row["strategy"], step_s=row["step_time_s"])
    return KnownStrategy(fingerprint=row["fingerprint"], form=row["form"], found=found, seen_s=row["seen_s"])


def _measurements(table: pa.Table) -> Measurements:
    """Return the measurements in the rows; columns missing in files of earlier versions are null."""
    for name in ("samples", "part", "declarer", "form", "strategy"):
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), _SCHEMA.field(name).type))
    rows = table.select(_SCHEMA.names).to_pylist()
    return Measurements(
        steps=tuple(_step(row) for row in rows if row["kind"] == "step"),
        noises=tuple(_noise(row) for row in rows if row["kind"] == "noise"),
        lengths=tuple(_length(row) for row in rows if row["kind"] == "length"),
        strategies=tuple(_strategy(row) for row in rows if row["kind"] == "strategy"),
    )


def _step(row: dict[str, Any]) -> KnownStep:
    """Return the step time in a row of kind ``step``; raises TypeError or ValueError where a value is out of range."""
    return KnownStep(
        fingerprint=row["fingerprint"],
        gpu_type=row["gpu_type"],
        machines=frozenset(row["machines"]),
        observation=Observation(
            row["nodes"],
            row["replicas"],
            row["atomic_bsz"],
            row["accum_steps"],
            step_time=row["step_time_s"],
            grad_time=row["grad_time_s"],
            count=row["weight"],
        ),
        seen_s=row["seen_s"],
    )


def _noise(row: dict[str, Any]) -> KnownNoise:
    """Return the noise scale in a row of kind ``noise``; its atomic range is None where either bound is missing."""
    least, most = row["atomic_bsz_least"], row["atomic_bsz_most"]
    return KnownNoise(
        fingerprint=row["fingerprint"],
        gpu_type=row["gpu_type"],
        epoch=row["epoch"],
        noise=NoiseScale(sqr=row["noise_sqr"], var=row["noise_var"]),
        batches=Batches(
            init_batch_size=row["init_batch_size"],
            max_batch_size=row["max_batch_size"],
            atomic_bsz_range=None if least is None or most is None else (least, most),
            accumulation=row["accumulation"],
        ),
        seen_s=row["seen_s"],
    )


def _length(row: dict[str, Any]) -> KnownLength:
    """Return the length in a row of kind ``length``; raises TypeError or ValueError where a value is out of range."""
    samples, part = row["samples"], row["part"]
    if not 0 < samples < math.inf or not (part is None or 0 < part < math.inf):
        raise ValueError(f"a length must be above 0 and finite, but is {samples} samples, {part} of what was declared")
    return KnownLength(
        fingerprint=row["fingerprint"], samples=samples, part=part, seen_s=row["seen_s"], declarer=row["declarer"] or ""
    )
