"""Reports and lines that wait: bounded memory, order kept, none twice, and what had to go is counted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.checkpoints.line_files import LineFile
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.driver.handle import all_reports
from elastic_ray.events import JobPhase, Report
from elastic_ray.record.record import JobRecord
from elastic_ray.record.report_queue import Backlog, BoundedLog, ReportQueue
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.messages import WorkerReport
from tests.hanging_storage import HangingHandler, HangingStorage
from tests.job.specs import spec


@given(st.lists(st.sampled_from(["add", "add", "take", "written", "failed"]), max_size=60))
def test_lines_stay_in_order_and_are_written_once(steps: list[str]) -> None:
    backlog, count, taken = Backlog(most=5), 0, None
    file: list[str] = []
    dropped = 0
    for step in steps:
        if step == "add":
            backlog.add(str(count))
            count += 1
        elif step == "take" and taken is None:
            taken = backlog.take()
        elif step == "written" and taken is not None:
            backlog.written()
            file.extend(taken)
            taken = None
        elif step == "failed" and taken is not None:
            backlog.failed()
            taken = None
        assert len(backlog) <= 10
    if taken is not None:
        backlog.failed()
    file.extend(backlog.take())
    dropped = backlog.dropped
    assert file == sorted(file, key=int) and len(set(file)) == len(file)
    assert len(file) + dropped == count


def test_the_oldest_of_too_many_lines_are_counted() -> None:
    backlog = Backlog(most=3)
    for line in "abcd":
        backlog.add(line)
    assert (len(backlog), backlog.dropped, "a" in backlog, "b" in backlog) == (3, 1, False, True)
    assert backlog.take() == ("b", "c", "d") and backlog.pop_dropped() == 1 and backlog.pop_dropped() == 0
    for line in "efgh":
        backlog.add(line)
    assert (len(backlog), backlog.dropped) == (6, 1), "what is being written stays, and e is gone"
    backlog.written()
    assert backlog.take() == ("f", "g", "h")
    backlog.add("i")
    backlog.failed()
    assert backlog.take() == ("g", "h", "i") and backlog.dropped == 2


def test_a_log_is_full_with_one_too_many() -> None:
    log: BoundedLog[int] = BoundedLog(2)
    for number in (5, 4):
        log.put(number, number)
    assert (log.low, log.first, log.last, log.gone(3)) == (4, 4, 5, False)
    log.put(6, 6)
    assert (log.low, log.values(), log.gone(4), log.gone(5), log.get(4)) == (5, (5, 6), True, False, None)
    log.put(4, 0)
    log.put(9, 9)
    assert log.values() == (6, 9) and (log.low, log.last) == (6, 9)


@given(st.permutations(range(1, 40)), st.integers(1, 10))
def test_of_many_the_last_are_kept(order: list[int], most: int) -> None:
    log: BoundedLog[int] = BoundedLog(most)
    for number in order:
        log.put(number, -number)
        assert len(log.values()) <= most
    assert (log.first, log.last) == (1, 39)
    assert log.get(39) == -39 and all(log.gone(n) or n in log for n in range(1, 40))


def test_a_restart_goes_back_and_what_it_repeats_counts() -> None:
    log: BoundedLog[str] = BoundedLog(3)
    for number in range(1, 8):
        log.put(number, "first")
    for number in range(2, 7):
        log.put(number, "again")
    assert log.values() == ("again", "again", "first") and log.last == 7


@pytest.mark.thorough
def test_hundred_thousand_reports_cost_same_time_and_no_memory(tmp_path: Path) -> None:
    record, report_queue, storage = JobRecord(spec()), ReportQueue(), RunStorage(str(tmp_path / "run"))
    storage.create()

    def go(begin: int, end: int) -> float:
        begin_s = time.process_time()
        for index in range(begin, end):
            record.report(
                WorkerReport(
                    worker="w",
                    index=index,
                    metrics={"loss": 1.0 / index},
                    checkpoint=None,
                    resume_point=ResumePoint(epoch=0),
                )
            )
            report_queue.put(Report(index=index, metrics={"loss": 1.0 / index}))
            if index % 500 == 0:
                storage.reports.append(record.unwritten_reports.take())
                record.unwritten_reports.written()
        return time.process_time() - begin_s

    early_s = go(1, 10_001)
    gc.collect()
    tracemalloc.start()
    go(10_001, 12_001)
    before, _ = tracemalloc.get_traced_memory()
    go(12_001, 20_001)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000, f"{(after - before) / 8_000:.1f} bytes a report"
    go(20_001, 70_001)
    late_s = min(go(first, first + 10_000) for first in (70_001, 80_001, 90_001))  # the least disturbed of them
    assert late_s < 3 * early_s, f"{early_s} s for the first 10 000, {late_s} s for the last ones"

    record.end(JobPhase.FINISHED, error=None, return_value=None, message="")
    outcome = record.outcome()
    assert outcome is not None and outcome.first_report == 1 and len(outcome.reports) == 1000
    assert dict(outcome.metrics) == {"loss": 1.0 / 100_000}
    assert [report.index for report in all_reports(outcome, storage, timeout_s=60)] == list(range(1, 100_001))
    assert report_queue.gone(1) and report_queue.oldest == 99_001
    found = asyncio.run(report_queue.next(99_500, 0.0))
    assert found is not None and found.index == 99_501


def test_tail_that_storage_cannot_complete_is_given_as_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hanging = HangingStorage(tmp_path)
    storage = RunStorage("run", hanging.filesystem)
    record = JobRecord(spec())
    for index in range(1, 1301):
        record.report(
            WorkerReport(worker="w", index=index, metrics={}, checkpoint=None, resume_point=ResumePoint(epoch=0))
        )
    record.end(JobPhase.FINISHED, error=None, return_value=None, message="")
    outcome = record.outcome()
    assert outcome is not None
    hanging.hang()
    try:
        assert [report.index for report in all_reports(outcome, storage, timeout_s=0.2)] == list(range(301, 1301))
    finally:
        hanging.answer()
    assert "300 of 300 reports before number 301 cannot be had: storage hanging://run has not answered" in caplog.text


@pytest.mark.parametrize("local", [True, False])
def test_lines_that_could_not_be_added_leave_no_part(
    tmp_path: Path, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    filesystem = pyarrow.fs.LocalFileSystem()
    hanging = HangingStorage(tmp_path)
    path = str(tmp_path / "lines.jsonl") if local else "lines.jsonl"
    file = LineFile(filesystem if local else hanging.filesystem, path, private=True, in_parts=True)
    file.append(["a", "b"])
    real, budget = os.write, [3]

    def full(descriptor: int, data: bytes) -> int:
        if not budget:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: budget.pop()])

    with monkeypatch.context() as patched:
        if local:
            patched.setattr(os, "write", full)
        else:
            hanging.fail("jsonl")
        with pytest.raises(OSError, match=r"No space|bad moment"):
            file.append(["cccccc", "d"])
    hanging.answer()
    file.append(["cccccc", "d"])
    assert list(file.read()) == ["a", "b", "cccccc", "d"]


class Ending(HangingHandler):
    """A file system that HDFS and SFTP stand for: opening a file empties it, and the process may end at any call."""

    left = 1000  # calls
    replaces = True

    def _call(self) -> None:
        if self.left <= 0:
            raise OSError("the process has ended")
        self.left -= 1

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._call()
        stream = super().open_output_stream(path, metadata)
        self._call()  # the file is there, and empty
        return stream

    def move(self, src: str, dest: str) -> None:
        self._call()
        if not self.replaces and (Path(self.root) / dest).exists():
            raise OSError("the target exists")
        super().move(src, dest)

    def delete_file(self, path: str) -> None:
        self._call()
        super().delete_file(path)


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("in_parts", [True, False])
def test_lines_stay_wherever_writer_ends_that_writes_file_anew(tmp_path: Path, replaces: bool, in_parts: bool) -> None:
    handler = Ending(str(tmp_path), str(tmp_path / "none"))
    handler.replaces = replaces
    filesystem = pyarrow.fs.PyFileSystem(handler)
    file, added = LineFile(filesystem, "lines.jsonl", private=True, in_parts=in_parts), []
    for number in range(24):
        handler.left = number % 8
        with contextlib.suppress(OSError):
            file.append([f"{number} a", f"{number} b"])
            added += [f"{number} a", f"{number} b"]
        handler.left = 1000
        file = LineFile(filesystem, "lines.jsonl", private=True, in_parts=in_parts)  # of the controller after it
        found = list(file.read())
        assert [line for line in found if line in added] == added
        added = found  # what came without being reported is there for good as well
    assert len(added) > 12


def test_where_files_are_written_anew_lines_come_in_parts(tmp_path: Path) -> None:
    hanging = HangingStorage(tmp_path)
    for writer in range(2):  # the second after a restart of its controller
        file = LineFile(hanging.filesystem, "reports.jsonl", private=True, in_parts=True)
        for number in range(30):
            file.append([f"{writer}.{number}.{line}" for line in range(100)])
    wanted = [f"{w}.{n}.{line}" for w in range(2) for n in range(30) for line in range(100)]
    assert list(file.read()) == wanted
    parts = sorted((hanging.root / "reports").iterdir())
    assert [len(part.read_text().splitlines()) for part in parts] == [1000] * 6


@given(st.lists(st.sampled_from([0, 1, 7, 8, 9, 20, 70]), max_size=9), st.integers(1, 30), st.booleans())
def test_only_lines_that_are_too_long_are_left_out(sizes: list[int], piece: int, ends: bool) -> None:
    lines = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    content = b"\n".join(lines) + (b"\n" if ends and lines else b"")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("elastic_ray.checkpoints.line_files.LONGEST_LINE", 40)
        patched.setattr("elastic_ray.checkpoints.line_files.PIECE", piece)
        filesystem = pyarrow.fs._MockFileSystem()
        with filesystem.open_output_stream("lines") as stream:
            stream.write(content)
        found = list(LineFile(filesystem, "lines", private=False).read())
    short = [line.decode() for line in lines if len(line) < 40]
    assert [line for line in found if line] == [line for line in short if line]


def test_a_line_of_any_length_fills_no_memory(tmp_path: Path) -> None:
    (path := tmp_path / "events.jsonl").write_bytes(b"first\n")
    with path.open("ab") as file:
        file.truncate(1 << 28)  # zeros that take no room on the disk
        file.seek(0, 2)
        file.write(b"\nlast\n")
    tracemalloc.start()
    found = list(LineFile(pyarrow.fs.LocalFileSystem(), str(path), private=True).read())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == ["first", "last"] and peak < 64 << 20


def test_metrics_that_json_cannot_hold_are_rows_all_same() -> None:
    found = Report.from_json(Report(index=3, metrics={("a", 1): object, "b": 2}).to_json())
    assert found.index == 3 and found.metrics["b"] == "2"


def test_lines_after_one_cut_short_stand_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("whole\ncut sh")
    LineFile(pyarrow.fs.LocalFileSystem(), str(path), private=False).append(["next", "last"])
    assert path.read_text() == "whole\ncut sh\nnext\nlast\n"
