"""Where a job continues: bad files are passed over with a reason, and storage that is away is not an empty one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.background import Background
from elastic_ray.checkpoints.automatic import StateFile, StoredProgress, delete_others, find_stored, state_files
from elastic_ray.checkpoints.run_directory import PROGRESS_FILE, RunStorage, StoredCheckpoint
from elastic_ray.checkpoints.sharded.saver import write_state
from elastic_ray.config import ElasticConfig
from elastic_ray.events import EventKind, JobPhase
from elastic_ray.job.journal import Journal
from elastic_ray.job.supervisor import JobSupervisor
from elastic_ray.record.record import JobRecord
from elastic_ray.record.writer import RecordWriter
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.messages import WorkerReport
from tests.hanging_storage import HangingStorage
from tests.job.specs import spec

POINT = {"epoch": 1, "epochs": 4, "passes": [[48, False]], "steps": 10, "reports": 1, "done": 9.5, "epoch_ends": [8.0]}


def at(steps: int) -> ResumePoint:
    point = ResumePoint.from_json({**POINT, "steps": steps})
    assert point is not None
    return point


def note(**changes: Any) -> str:
    return json.dumps({"index": 2, "progress": {**POINT, **changes}, "metrics": {}, "files": {}})


def state_note(**changes: Any) -> str:
    return json.dumps({"resume_point": {**POINT, **changes}, "sha256": "0", "size": 3, "parts": 1})


def look(storage: RunStorage, *, verify: bool = False) -> StoredProgress:
    return find_stored(storage, start_from=None, is_trial=False, with_states=True, verify=verify)


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    """A run with a good checkpoint, number 1, and a good state, of 5 steps."""
    storage = RunStorage(str(tmp_path / "run"))
    storage.create()
    (source := tmp_path / "source").mkdir()
    (source / "model.pt").write_bytes(b"weights")
    storage.persist_checkpoint(source, 1, resume_point=at(10), metrics={"loss": 1.0})
    write_state(storage, {}, at(5))
    return storage


BAD: dict[str, tuple[Any, str]] = {
    "infinite": (note(steps=float("inf")), "steps must be a whole number from 0, but is inf"),
    "not a number": (note(done=float("nan")), "statistical progress must be finite"),
    "negative": (note(reports=-1), "reports must be a whole number"),
    "no epoch": (json.dumps({"progress": {"steps": 3}, "metrics": {}}), "it has no 'epoch'"),
    "a list": (json.dumps({"progress": [1], "metrics": {}}), "progress=[1], which is no object"),
    "passes": (note(passes=[["x", False]]), "position must be a whole number"),
    "passes of three": (note(passes=[[1, 2, 3]]), "is not used"),
    "passes that are none": (note(passes=7), "not a position in a run"),
    "no JSON": ("{", "is not JSON"),
    "not ours": ("[]", "lacks 'progress'"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_note_is_passed_over_with_a_reason(storage: RunStorage, bad: str) -> None:
    text, reason = BAD[bad]
    (folder := Path(storage.path) / "checkpoint_000002").mkdir()
    (folder / PROGRESS_FILE).write_text(text)
    found = look(storage)
    assert [checkpoint.index for checkpoint in found.checkpoints] == [1]
    (told,) = found.passed_over
    assert "checkpoint_000002" in told and reason in told


@pytest.mark.parametrize("name", ["model.pt", "rank_1.pt"])
@pytest.mark.parametrize("change", ["shorter", "longer", "gone", "other"])
def test_files_other_than_those_written_are_no_checkpoint(
    storage: RunStorage, tmp_path: Path, name: str, change: str
) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "rank_1.pt").write_bytes(b"weights")
    storage.persist_checkpoint(tmp_path / "source", 2, resume_point=at(20))
    assert storage.add_to_checkpoint(other, 2) == ["rank_1.pt"]
    assert len(look(storage, verify=True).checkpoints) == 2
    file = Path(storage.path) / "checkpoint_000002" / name
    file.write_bytes({"shorter": b"w", "longer": b"weights and more", "gone": b"", "other": b"WEIGHTS"}[change])
    if change == "gone":
        file.unlink()
    reasons = {"gone": "is not there, but 7 bytes", "shorter": "has 1 bytes, but 7", "longer": "has 16 bytes, but 7"}
    if change == "other":  # of the same size: found on demand
        assert len(look(storage).checkpoints) == 2
    found = look(storage, verify=change == "other")
    assert [checkpoint.index for checkpoint in found.checkpoints] == [1]
    (told,) = found.passed_over
    assert f"its {name} {reasons.get(change, 'does not have the checksum')}" in told


def make_note_directory(run: Path) -> None:
    (run / "checkpoint_000002" / PROGRESS_FILE).mkdir(parents=True)


def make_checkpoint_file(run: Path) -> None:
    (run / "checkpoint_000002").write_text("")


def make_state_note_directory(run: Path) -> None:
    (run / "automatic" / "step_2.json").mkdir()


def make_infinite_state_note(run: Path) -> None:
    (run / "automatic" / "step_2.json").write_text(state_note(steps=float("inf")))


def make_state_note_without_steps(run: Path) -> None:
    (run / "automatic" / "step_2.json").write_text(json.dumps({"resume_point": {}, "sha256": "", "size": 1}))


@pytest.mark.parametrize(
    "make",
    [
        make_note_directory,
        make_checkpoint_file,
        make_state_note_directory,
        make_infinite_state_note,
        make_state_note_without_steps,
    ],
)
def test_what_is_no_note_is_passed_over_and_replaced(
    storage: RunStorage, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(Path(storage.path))
    found = look(storage)
    assert [checkpoint.index for checkpoint in found.checkpoints] == [1]
    assert [state.steps for state in found.states] == [5]
    assert len(found.passed_over) == 1
    storage.persist_checkpoint(tmp_path / "source", 2, resume_point=at(10))
    state = write_state(storage, {}, at(20))
    delete_others(storage, state, keep=2)
    assert [checkpoint.index for checkpoint in look(storage).checkpoints] == [1, 2]
    assert [state.steps for state in state_files(storage)] == [20, 5]


def test_file_in_place_of_automatic_checkpoints_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "automatic").write_text("")
    found = look(RunStorage(str(tmp_path)))
    assert found.states == () and "it is a file" in found.passed_over[0]


# --- storage that is away -----------------------------------------------------------------------------------


def away(tmp_path: Path, journal: Journal, timeout_s: float) -> tuple[HangingStorage, JobSupervisor]:
    hanging = HangingStorage(tmp_path)
    (hanging.root / "run").mkdir()
    elastic = ElasticConfig(storage_timeout_s=timeout_s)
    told = spec(storage_path="run", storage_filesystem=hanging.filesystem, elastic=elastic, max_failures=1)
    return hanging, JobSupervisor(told, None, Background(), journal)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_bad_moment_of_storage_is_not_an_empty_one(storage: RunStorage, tmp_path: Path) -> None:
    hanging = HangingStorage(tmp_path)
    Path(storage.path).rename(hanging.root / "run")
    told = spec(storage_path="run", storage_filesystem=hanging.filesystem)
    record = JobRecord(told)

    async def run() -> StoredProgress:
        writer = RecordWriter(told, record, Background(), lambda what: None)
        hanging.fail("run/checkpoint")
        looking = asyncio.create_task(writer.poll(30.0))
        await until(lambda: "a bad moment" in record.waiting)
        assert not looking.done()
        hanging.answer()
        return await looking

    found = asyncio.run(run())
    assert record.waiting == ""
    record.found(found)
    assert record.resume_point is not None and record.resume_point.steps == 10


@pytest.mark.parametrize("how", ["hang", "fail"])
def test_a_job_whose_storage_stays_away_fails_not_restarts(tmp_path: Path, journal: Journal, how: str) -> None:
    hanging, job = away(tmp_path, journal, timeout_s=0.5 if how == "hang" else 3.0)
    getattr(hanging, how)()
    try:
        asyncio.run(job.open())
    finally:
        hanging.answer()
    status = job.status()
    assert status.phase is JobPhase.FAILED
    assert "it is not known where job 'j' is to continue" in status.message
    assert ("has not answered" if how == "hang" else "a bad moment") in status.message


@pytest.mark.thorough
def test_job_waiting_for_storage_says_so_and_can_stop(tmp_path: Path, journal: Journal) -> None:
    hanging, job = away(tmp_path, journal, timeout_s=60)

    async def run() -> None:
        hanging.hang()
        opening = asyncio.create_task(job.open())

        def says_so() -> bool:
            job.update_observers(time.monotonic())
            return "storage hanging://run has not answered for" in job.status().note

        await until(says_so)
        begin_s = time.monotonic()
        job.stop()
        await job.shutdown.written()
        assert job.status().phase is JobPhase.STOPPED and time.monotonic() - begin_s < 40
        hanging.answer()
        await opening
        assert job.status().phase is JobPhase.STOPPED

    asyncio.run(run())


# --- events -------------------------------------------------------------------------------------------------


def test_events_are_written_once_storage_is_back_in_order(tmp_path: Path, journal: Journal) -> None:
    hanging, job = away(tmp_path, journal, timeout_s=60)
    storage = RunStorage("run", hanging.filesystem)

    async def run() -> None:
        for number, trouble in enumerate((hanging.fail, hanging.hang)):
            trouble("events")
            for part in range(3):
                job.events.storage(f"{number}.{part}")
                job.update_observers(time.monotonic())
                await asyncio.sleep(0.05)
            job.record.events[-1].to_json()
            hanging.answer()

            def written() -> bool:
                job.update_observers(time.monotonic())
                return len(storage.read_events()) == len(job.record.events)

            await until(written)

    asyncio.run(run())
    assert storage.read_events() == tuple(job.record.events)
    assert [event.kind for event in job.record.events] == [EventKind.STORAGE] * 6


def test_new_controller_continues_where_files_of_one_before_end(tmp_path: Path, journal: Journal) -> None:
    """Two events and a report were written; of a third event only the ledger knows."""
    hanging, first = away(tmp_path, journal, timeout_s=60)
    storage = RunStorage("run", hanging.filesystem)
    background = Background()

    async def run() -> None:
        for what in "ab":
            first.events.storage(what)
        for index in range(4, 1204):
            first.record.report(
                WorkerReport(worker="w", index=index, metrics={"x": index}, checkpoint=None, resume_point=at(0))
            )

        def written() -> bool:
            first.update_observers(time.monotonic())
            return len(storage.read_events()) == 2 and len(storage.read_reports(4, 1203)) == 1200

        await until(written)
        first.events.storage("c")
        told = spec(storage_path="run", storage_filesystem=hanging.filesystem)
        record = JobRecord(told)
        record.events = list(first.record.events)
        record.event(dataclasses.replace(record.events[0], reason="d"))  # before the files are read
        writer = RecordWriter(told, record, background, lambda what: None)
        reports = await writer.catch_up(4)
        assert [report.index for report in reports] == list(range(204, 1204))
        await writer.finish()
        assert (record.reports.first, record.reports.last, record.metrics) == (4, 1203, {"x": 1203})

    asyncio.run(run())
    assert [event.reason for event in storage.read_events()] == ["a", "b", "d", "c"], "each once"


# --- the newest of what anybody has -------------------------------------------------------------------------


def test_a_restart_uses_what_storage_has_unheard_or_not() -> None:
    """The controller has heard of a state at 20; at 40 there is another one, and a checkpoint at 30."""

    def state(steps: int) -> StateFile:
        return StateFile(path=f"step_{steps}", size=1, sha256="", resume_point=at(steps))

    def checkpoint(index: int, steps: int) -> StoredCheckpoint:
        return StoredCheckpoint(index=index, path=f"checkpoint_{index}", resume_point=at(steps), metrics={})

    record = JobRecord(spec())
    record.report(
        WorkerReport(worker="w", index=1, metrics={"loss": 1}, checkpoint="checkpoint_1", resume_point=at(10))
    )
    record.saved(state(20))
    assert record.resume_point == state(20).resume_point
    found = StoredProgress(checkpoints=(checkpoint(1, 10), checkpoint(2, 30)), states=(state(40), state(20)))
    assert record.found(found) == ()
    assert record.resume_point == state(40).resume_point
    assert record.restart_point == ("checkpoint_2", at(30))
    record.found(StoredProgress(checkpoints=(checkpoint(1, 10),)))
    assert record.restart_point[0] == "checkpoint_1", "somebody has deleted the other"
    record.found(StoredProgress())
    assert record.restart_point == (None, None)


def test_dying_controller_leaves_the_last_state_to_the_next() -> None:
    """The job had finished, and what tells its last state from others was not written yet."""

    def state(steps: int) -> StateFile:
        return StateFile(path=f"automatic/step_{steps}", size=1, sha256="", resume_point=at(steps))

    for finished in ((), (state(90),)):  # of an earlier job of this name
        record = JobRecord(spec())
        record.phase = JobPhase.FINISHED
        record.found(StoredProgress(states=(state(40), state(20)), result=finished))
        assert record.last_state == state(40)
    record.found(StoredProgress(result=(state(40),)))
    assert record.last_state == state(40)


@pytest.mark.parametrize("how", ["answers", "hang", "fail"])
def test_after_loss_of_all_job_looks_what_storage_has(tmp_path: Path, journal: Journal, how: str) -> None:
    """Rank 0 has written a state at 40 and was lost before its controller heard of it."""
    hanging, job = away(tmp_path, journal, timeout_s=60.0 if how == "answers" else 0.3)
    storage = RunStorage("run", hanging.filesystem)
    states = [write_state(storage, {}, at(n)) for n in (20, 40)]
    job.record.saved(states[0])

    async def run() -> None:
        if how != "answers":
            getattr(hanging, how)()
        job.all_lost("lost worker w1")
        await until(lambda: bool(job.record.events))
        hanging.answer()

    asyncio.run(run())
    (event,) = job.record.events
    assert event.kind is EventKind.RESTART
    assert event.reason == f"lost worker w1; it starts from step {40 if how == 'answers' else 20}"
    assert job.record.states[0].steps == (40 if how == "answers" else 20)


def test_job_that_does_not_know_its_storage_never_restarts(tmp_path: Path, journal: Journal) -> None:
    """As of a controller that was restarted while storage hung, and then lost its workers."""
    hanging, job = away(tmp_path, journal, timeout_s=0.3)

    async def run() -> None:
        hanging.hang()
        job.all_lost("lost worker w1")
        await until(lambda: job.record.phase.ended)
        hanging.answer()

    asyncio.run(run())
    assert job.status().phase is JobPhase.FAILED
    assert "it is not known where job 'j' is to continue" in job.status().message
