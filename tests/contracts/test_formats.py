"""Files and notes that outlive a process: today's are in ``golden/``, are read as they were meant, and written again.

A format that changes gets the next number, a golden file of its own beside the ones before it, which are still read.
``python -m tests.contracts.test_formats`` writes those that are missing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.checkpoints.automatic import DIRECTORY, StateFile, state_files, write_note
from elastic_ray.checkpoints.run_directory import PROGRESS_FILE, RunStorage
from elastic_ray.checkpoints.sharded.manifest import (
    Manifest,
    ManifestError,
    Part,
    StoredPiece,
    StoredTensor,
)
from elastic_ray.events import EventKind, JobEvent, Report
from elastic_ray.record.controller_state import ControllerState
from elastic_ray.state.codec import TensorIndex, decode, encode
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.spec import Reduce, Strategy
from elastic_ray.worker.process import WorkerProcess
from placement.allocator.actor import Allocator
from placement.allocator.events import JobEnded, NodesChanged
from placement.allocator.recording import event_line, read_recording, start_line
from placement.errors import InputError
from placement.knowledge.records import KnownLength, Measurements
from placement.knowledge.store import FOLDER, KnowledgeStore
from placement.policies import GoodputPolicy
from placement.versions import Spoken, VersionError
from tests.placement.stored_knowledge import root_at
from tests.placement.views import cluster

GOLDEN = Path(__file__).parent / "golden"
POINT = ResumePoint(epoch=1, epochs=4, passes=((48, False),), steps=10, reports=1, done=9.5, epoch_ends=(8.0,))
EVENT = JobEvent(
    kind=EventKind.RESIZE, time_s=1.5, from_workers=1, to_workers=2, reason="why", generation=3, detail={"batch": 64}
)
REPORT = Report(index=2, metrics={"loss": 0.25}, checkpoint="checkpoint_000002", workers=2, epochs_done=1, steps=10)
STATE = ControllerState(
    **{
        **dict.fromkeys(("job", "run", "phase", "message", "reason"), "text"),
        **dict.fromkeys(("issued", "world_size", "named", "failures", "fruitless", "saved_steps"), 1),
        **dict.fromkeys(("submitted_s", "weight", "lost", "resize_cost_s", "start_s"), 1.5),
        **dict.fromkeys(("trained", "saved", "stopping"), False),
        "announced": ("w0", "w1"),
        "nodes": {"n0": 2},
        "held_at": None,
        "most_workers": 2,
        "resizes": 1,
        "preempted": None,
        "processes": {"w0": "p0"},
        "revivals": (2.5,),
    }
)
PIECE = StoredPiece(start=0, length=2, offset=64, nbytes=8, offsets=(0,), sizes=(2,), archive=(0, 128))
TENSOR = StoredTensor(path=("model", "weight"), shape=(2,), dtype="float32", pieces=((0, PIECE),))
MANIFEST = Manifest(steps=10, files=(("ab" * 32, 200),), tree={"model": {"weight": TensorIndex(0)}}, tensors=(TENSOR,))
PART = Part(rank=0, steps=10, sha256="ab" * 32, size=200, tensors=(TENSOR,))
STRATEGY = Strategy(name="mine", default=Reduce(bucket_bytes=25 << 20))
LENGTHS = Measurements(lengths=(KnownLength(fingerprint="net", samples=1e6, part=0.5, seen_s=7.0),))
TOLD = (NodesChanged(cluster=cluster(4)), JobEnded(job="a"))


def _state_note(folder: Path) -> bytes:
    storage = RunStorage(str(folder / "run"))
    storage.create()
    path = folder / "run" / DIRECTORY / "step_10"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_note(storage, StateFile(path=str(path), resume_point=POINT, sha256="ab" * 32, size=3))
    return path.with_suffix(".json").read_bytes()


def _checkpoint_note(folder: Path) -> bytes:
    (source := folder / "source").mkdir()
    storage = RunStorage(str(folder / "run"))
    storage.create()
    stored = storage.persist_checkpoint(source, 1, resume_point=POINT, metrics={"loss": 0.25})
    return (Path(stored.path) / PROGRESS_FILE).read_bytes()


def _knowledge(folder: Path) -> bytes:
    KnowledgeStore(root_at(folder), "one").save(LENGTHS)
    return (folder / FOLDER / "one.parquet").read_bytes()


def _recording(_: Path) -> bytes:
    lines = [start_line(GoodputPolicy(), None, settling=True), *(event_line(each, 1.5) for each in TOLD)]
    return "".join(lines).encode()


WRITTEN: dict[str, Callable[[Path], bytes]] = {
    "automatic_note_1.json": _state_note,
    "checkpoint_note_1.json": _checkpoint_note,
    "controller_state_1.json": lambda _: json.dumps(dataclasses.asdict(STATE)).encode(),
    "event_1.jsonl": lambda _: EVENT.to_json().encode(),
    "report_1.jsonl": lambda _: REPORT.to_json().encode(),
    "manifest_1.bin": lambda _: MANIFEST.to_bytes(),
    "part_1.bin": lambda _: PART.to_bytes(),
    "strategy_1.json": lambda _: STRATEGY.to_json().encode(),
    "recording_1.jsonl": _recording,
    "knowledge_1.parquet": _knowledge,
}


def _read_state_note(content: bytes, folder: Path) -> Any:
    storage = RunStorage(str(folder / "run"))
    (folder / "run" / DIRECTORY).mkdir(parents=True)
    (folder / "run" / DIRECTORY / "step_10.json").write_bytes(content)
    why: list[str] = []
    found = state_files(storage, why.append)
    if why:
        raise ValueError(why[0])
    return [(each.resume_point, each.sha256, each.size, each.parts) for each in found]


def _read_checkpoint_note(content: bytes, folder: Path) -> Any:
    (at := folder / "checkpoint_000001").mkdir()
    (at / PROGRESS_FILE).write_bytes(content)
    why: list[str] = []
    found = RunStorage(str(folder)).stored_checkpoints(why.append)
    if why:
        raise ValueError(why[0])
    return [(each.resume_point, each.metrics) for each in found]


def _read_knowledge(content: bytes, folder: Path) -> Any:
    (folder / FOLDER).mkdir(parents=True)
    (folder / FOLDER / "one.parquet").write_bytes(content)
    return KnowledgeStore(root_at(folder), "two").load()


def _read_recording(content: bytes, _: Path) -> Any:
    (life,) = read_recording(content.decode().splitlines(keepends=True))
    return life.settling, [each for _, each in life.events]


READ: dict[str, tuple[Callable[[bytes, Path], Any], Any]] = {
    "automatic_note_1.json": (_read_state_note, [(POINT, "ab" * 32, 3, 1)]),
    "checkpoint_note_1.json": (_read_checkpoint_note, [(POINT, {"loss": 0.25})]),
    "controller_state_1.json": (lambda content, _: ControllerState.from_json(content.decode()), STATE),
    "event_1.jsonl": (lambda content, _: JobEvent.from_json(content.decode()), EVENT),
    "report_1.jsonl": (lambda content, _: Report.from_json(content.decode()), REPORT),
    "manifest_1.bin": (lambda content, _: Manifest.from_bytes(content), MANIFEST),
    "part_1.bin": (lambda content, _: Part.from_bytes(content), PART),
    "strategy_1.json": (lambda content, _: Strategy.from_json(content.decode()), STRATEGY),
    "recording_1.jsonl": (_read_recording, (True, list(TOLD))),
    "knowledge_1.parquet": (_read_knowledge, LENGTHS),
}


def test_each_golden_file_has_a_reader() -> None:
    assert sorted(each.name for each in GOLDEN.iterdir()) == sorted(READ)
    assert WRITTEN.keys() <= READ.keys()


@pytest.mark.parametrize("name", sorted(READ))
def test_what_was_written_once_is_read(name: str, tmp_path: Path) -> None:
    read, expected = READ[name]
    assert read((GOLDEN / name).read_bytes(), tmp_path) == expected


# Parquet files say which library wrote them, recordings say each setting of today: their contents alone are compared.
BYTE_FOR_BYTE = WRITTEN.keys() - {"knowledge_1.parquet", "recording_1.jsonl"}


@pytest.mark.parametrize("name", sorted(BYTE_FOR_BYTE))
def test_todays_format_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    assert WRITTEN[name](tmp_path) == (GOLDEN / name).read_bytes()


def test_todays_recording_says_what_it_said(tmp_path: Path) -> None:
    read, expected = READ["recording_1.jsonl"]
    assert read(WRITTEN["recording_1.jsonl"](tmp_path), tmp_path) == expected


def _newer(name: str) -> bytes:
    """The golden file as a newer release would write it."""
    content = (GOLDEN / name).read_bytes()
    if name == "manifest_1.bin":
        return encode({**decode(content), "version": 2})
    if name == "knowledge_1.parquet":
        return content.replace(b"knowledge 1", b"knowledge 2")
    for known in (b'"format": 1', b'"format":1', b'"version": 1', b'"version":1'):
        if known in content:
            return content.replace(known, known[:-1] + b"2")
    raise AssertionError(f"{name} has no number")


REFUSED = {
    "automatic_note_1.json": (ValueError, "its format must be from 1 to 1, but is 2: a newer elastic-ray"),
    "checkpoint_note_1.json": (ValueError, "its format must be from 1 to 1, but is 2: a newer elastic-ray"),
    "controller_state_1.json": (ValueError, "its format must be from 1 to 1, but is 2: a newer elastic-ray"),
    "manifest_1.bin": (ManifestError, "not a record of version 1, but of 2"),
    "strategy_1.json": (StrategyError, "must be an object of version 1, but got 2"),
    "recording_1.jsonl": (InputError, "format must be 1, but got 2"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_a_newer_release_wrote_is_refused_by_name(name: str, tmp_path: Path) -> None:
    error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        READ[name][0](_newer(name), tmp_path)


def test_measurements_of_newer_release_are_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _read_knowledge(_newer("knowledge_1.parquet"), tmp_path) == Measurements()
    assert "elastic_ray='knowledge 1'" in caplog.text


def test_processes_of_different_releases_refuse_each_other_by_name() -> None:
    from elastic_ray.job.controller import JobController

    newer = Spoken(protocol=99, release="9.9")
    both = "must speak the same protocol, but got 99 .elastic-ray 9.9. and 1 "
    with pytest.raises(VersionError, match=f"a job and the cluster's allocator {both}"):
        asyncio.run(Allocator.speak(Allocator.__new__(Allocator), newer))
    with pytest.raises(VersionError, match=f"the driver and its job's controller {both}"):
        JobController(None, newer)
    with pytest.raises(VersionError, match=f"a job's controller and its worker process {both}"):
        WorkerProcess(None, newer)


if __name__ == "__main__":
    for name, write in WRITTEN.items():
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_bytes(write(Path(tempfile.mkdtemp())))
