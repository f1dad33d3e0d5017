"""The parts of trackers without a job: what is seen, the thread, and the files."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow.fs
import pytest
from hypothesis import given

from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import EventKind, JobEvent, JobPhase, Report
from elastic_ray.observe.trackers.callbacks import TrackedRun, folder_of
from elastic_ray.observe.trackers.run_trackers import TrackerThread
from elastic_ray.observe.trackers.series import JobNumbers, SeenReports, flat_numbers
from elastic_ray.observe.trackers.tensorboard import TensorBoardWriter
from tests.observe.tb_files import own_scalars, scalars, texts


def event(kind: EventKind, time_s: float = 1.0, **fields: Any) -> JobEvent:
    return JobEvent(kind=kind, time_s=time_s, **{"from_workers": 2, "to_workers": 3, "reason": "because", **fields})


def report(index: int, **fields: Any) -> Report:
    return Report(index=index, **{"metrics": {"loss": 1.0 / index}, "steps": 10 * index, **fields})


@given(st.lists(st.integers(1, 30)), st.integers(0, 30))
def test_each_report_is_seen_once_and_after_going_back(numbers: list[int], back: int) -> None:
    seen, known = SeenReports(), set[int]()
    for number in numbers:
        assert seen.add(number) == (number not in known)
        known.add(number)
        assert seen.last == max(known)
    seen.go_back(back)
    for number in range(1, 31):
        assert seen.add(number) == (number > back or number not in known)


def test_only_so_many_reports_are_remembered() -> None:
    seen = SeenReports()
    for number in range(2, 5000, 2):  # odd ones never come
        assert seen.add(number)
    assert not seen.add(3), "too late: it counts as seen"
    assert seen.add(4999)
    assert len(seen._above) <= 1001


def test_numbers_of_metrics() -> None:
    metrics = {"loss": 1, "ok": True, "eval": {"acc": 0.5, "name": "x", "deep": {"a": 2.0}}, "list": [1], "none": None}
    assert flat_numbers(metrics) == {"loss": 1.0, "ok": 1.0, "eval/acc": 0.5, "eval/deep/a": 2.0}
    assert flat_numbers({"huge": 10**400, "less": -(10**400)}) == {"huge": float("inf"), "less": float("-inf")}


class Recorder:
    """A tracker that writes down its calls, and fails as asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.block, self.blocked = threading.Event(), threading.Event()
        self.block.set()
        self.fails = False

    def start(self, step: int, reports: int, *, again: bool, events: tuple[JobEvent, ...]) -> None:
        self.calls.append(("begin", step, reports, again))

    def report(self, report: Report, time_s: float) -> None:
        self.blocked.set()
        self.block.wait(30)
        self.calls.append(report.index)
        if self.fails:
            raise SystemExit("no")

    def numbers(self, numbers: JobNumbers) -> None: ...

    def event(self, event: JobEvent) -> None: ...

    def flush(self) -> None: ...

    def finish(self, phase: JobPhase) -> None:
        self.calls.append(phase)


def wait_until_done(thread: TrackerThread) -> None:
    deadline_s = time.monotonic() + 30
    while not thread.done:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_calls_come_in_order_and_error_is_told_once() -> None:
    recorder = Recorder()
    recorder.fails = True
    thread = TrackerThread("it", recorder)
    thread.start(0, 0, again=False)
    for index in range(1, 4):
        thread.report(report(index), 0.0)
    thread.finish(JobPhase.FINISHED)
    thread.report(report(9), 0.0)  # too late
    wait_until_done(thread)
    assert recorder.calls == [("begin", 0, 0, False), 1, 2, 3, JobPhase.FINISHED]
    (problem,) = thread.problems(time.monotonic())
    assert problem.startswith("it raised in report") and "SystemExit: no" in problem
    assert thread.problems(time.monotonic()) == ()


class Unspeakable(Exception):
    """Says nothing of itself."""

    def __str__(self) -> str:
        raise RuntimeError("nor this")


def test_what_an_error_cannot_say_ends_no_thread() -> None:
    recorder = Recorder()
    thread = TrackerThread("it", recorder)
    errors = [Unspeakable(), ValueError("x" * 5_000_000)]

    def fail() -> None:
        raise errors.pop()

    thread.call("one", fail)
    thread.call("two", fail)
    thread.report(report(1), 0.0)
    thread.finish(JobPhase.FINISHED)
    wait_until_done(thread)
    assert recorder.calls == [1, JobPhase.FINISHED]
    long, silent = thread.problems(time.monotonic())
    assert len(long) < 700 and silent.endswith("Unspeakable: it cannot say why")


def test_begin_that_fails_is_tried_again_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.observe.trackers.run_trackers._AGAIN_S", 0.05)
    recorder, tries = Recorder(), [0]
    begin = recorder.start

    def late(*args: Any, **fields: Any) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError("storage is away for a moment")
        begin(*args, **fields)

    recorder.start = late
    thread = TrackerThread("it", recorder)
    thread.start(7, 0, again=False)
    thread.report(report(1), 0.0)
    deadline_s = time.monotonic() + 30
    while recorder.calls != [("begin", 7, 0, False), 1]:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    thread.finish(JobPhase.FINISHED)
    wait_until_done(thread)


def test_reports_that_wait_are_bounded_by_their_size() -> None:
    recorder = Recorder()
    recorder.block.clear()
    thread = TrackerThread("it", recorder)
    large = report(1, metrics={"text": "x" * 250_000})
    for _ in range(1000):
        thread.report(large, 0.0)
    assert thread._bytes <= 32 << 20 and thread._left_out > 800
    thread.give_up()
    recorder.block.set()


def test_a_hanging_tracker_is_told_and_its_queue_bounded() -> None:
    recorder = Recorder()
    recorder.block.clear()
    thread = TrackerThread("it", recorder, most=5)
    thread.report(report(1), 0.0)
    assert recorder.blocked.wait(30)
    begun_s = time.perf_counter()
    for index in range(2, 1000):
        thread.report(report(index), 0.0)
    assert time.perf_counter() - begun_s < 20.0
    problems = thread.problems(time.monotonic() + 31.0)
    assert [problem.split(" for ")[0].split(":")[0] for problem in problems] == [
        "it does not return from report",
        "it is too slow",
    ]
    thread.finish(JobPhase.FINISHED)
    assert not thread.done
    assert thread.give_up() == "it was given up at the job's end: 6 calls waited and was in report"
    recorder.block.set()
    wait_until_done(thread)
    assert recorder.calls == [1]


class Flaky(pyarrow.fs.FileSystemHandler):
    """An object store in a directory, which may be full: files are written anew, never added to."""

    def __new__(cls, folder: Path) -> Any:
        return super().__new__(cls)

    def __init__(self, folder: Path) -> None:
        self.inner, self.full, self.writes = (
            pyarrow.fs.SubTreeFileSystem(str(folder), pyarrow.fs.LocalFileSystem()),
            False,
            0,
        )

    def get_type_name(self) -> str:
        return "flaky"

    def normalize_path(self, path: str) -> str:
        return str(self.inner.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> Any:
        return self.inner.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self.inner.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self.inner.create_dir(path, recursive=recursive)

    def open_input_stream(self, path: str) -> Any:
        return pyarrow.PythonFile(self.inner.open_input_stream(path), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if self.full:
            raise OSError(28, "No space left on device")
        self.writes += 1
        return pyarrow.PythonFile(self.inner.open_output_stream(path), mode="w")

    def _unused(self, *args: Any) -> Any:
        raise NotImplementedError

    delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = _unused
    open_input_file = open_append_stream = _unused


def begin(writer: TensorBoardWriter, step: int = 0, reports: int = 0, *, again: bool = False, events: Any = ()) -> None:
    writer.start(step, reports, again=again, events=tuple(events))


def test_run_in_files_with_a_restart_from_a_checkpoint(tmp_path: Path) -> None:
    writer = TensorBoardWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path), private=True)
    begin(writer)
    for index in (1, 2, 3):
        writer.report(report(index), 1.0)
        writer.report(report(index), 1.0)  # told again
    writer.event(event(EventKind.FAILURE, 2.0, pause_s=0.5))
    writer.event(event(EventKind.RESTART, 3.0, detail={"steps": 10, "reports": 1}))
    writer.numbers(JobNumbers(time_s=1.0, step=11, values={"workers": 2.0}))
    for index in (2, 3, 4):
        writer.report(report(index, metrics={"loss": 7.0}), 1.0)
    writer.finish(JobPhase.FINISHED)
    folder = tmp_path / "tensorboard"
    shown = scalars(folder)
    assert shown["elastic/report"] == [(10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0)]
    assert [value for _, value in shown["loss"]] == [1.0, 7.0, 7.0, 7.0]
    assert shown["elastic/pause_s"] == [(10, 0.5)], "a mark stays where the run continues"
    assert texts(folder)["elastic/failure"] == [(10, "2 -> 3 workers, pause 0.50 s: because")]
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o077 == 0 and folder.stat().st_mode & 0o077 == 0


def test_another_controller_goes_on_where_the_files_end(tmp_path: Path) -> None:
    first = TensorBoardWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path), private=True)
    begin(first)
    first.report(report(1), 1.0)
    first.event(event(EventKind.RESIZE, 5.0))
    first.flush()
    first.report(report(2), 1.0)  # never written
    events = [event(EventKind.RESIZE, 5.0), event(EventKind.FAILURE, 6.0)]
    second = TensorBoardWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path), private=True)
    begin(second, again=True, events=events)
    for index in (1, 2, 3):
        second.report(report(index), 1.0)
    second.finish(JobPhase.FINISHED)
    folder = tmp_path / "tensorboard"
    assert len(list(folder.iterdir())) == 2
    assert [value for _, value in scalars(folder)["elastic/report"]] == [1.0, 2.0, 3.0]
    assert {tag: len(marks) for tag, marks in texts(folder).items()} == {"elastic/resize": 1, "elastic/failure": 1}


def test_the_same_name_submitted_again_continues_from_its_checkpoint(tmp_path: Path) -> None:
    first = TensorBoardWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path), private=True)
    begin(first)
    for index in (1, 2, 3):
        first.report(report(index), 1.0)
    first.finish(JobPhase.STOPPED)
    second = TensorBoardWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path), private=True)
    begin(second, 20, 2)
    second.report(report(3, metrics={"loss": 5.0}), 1.0)
    second.finish(JobPhase.FINISHED)
    assert scalars(tmp_path / "tensorboard")["loss"] == [(10, 1.0), (20, 0.5), (30, 5.0)]


def test_an_object_store_that_is_full_for_a_while(tmp_path: Path) -> None:
    store = Flaky(tmp_path)
    writer = TensorBoardWriter(pyarrow.fs.PyFileSystem(store), "run", private=True)
    begin(writer)
    writer.report(report(1), 1.0)
    writer.flush()
    written = store.writes
    writer.report(report(2), 1.0)
    writer.flush()
    assert store.writes == written, "files are written anew only now and then"
    store.full = True
    with pytest.raises(OSError, match="No space left"):
        writer.finish(JobPhase.FINISHED)
    store.full = False
    writer.finish(JobPhase.FINISHED)
    assert [value for _, value in own_scalars(tmp_path / "run" / "tensorboard")["elastic/report"]] == [1.0, 2.0]


def test_reports_without_steps_are_drawn_by_their_number(tmp_path: Path) -> None:
    writer = TensorBoardWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path), private=False)
    begin(writer)
    for index in (1, 2):
        writer.report(report(index, steps=0), 1.0)
    writer.finish(JobPhase.FINISHED)
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["loss"]] == [1, 2]


@pytest.mark.parametrize("taken", ["no", "a link", "another's"])
def test_loggers_write_into_no_other_accounts_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, taken: str
) -> None:
    if taken == "another's" and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    for name in ("bucket", "tmp", "victim"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    shared = tmp_path / "tmp" / f"elastic_ray_{os.geteuid()}"
    if taken == "a link":
        shared.symlink_to(tmp_path / "victim")
    elif taken == "another's":
        shared.mkdir()
        os.chown(shared, 65534, 65534)
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "bucket"), pyarrow.fs.LocalFileSystem())
    run = TrackedRun(job="a", run_id="1f", storage=RunStorage("runs/a", remote), is_trial=False)
    folder = Path(folder_of(run))
    assert (folder == shared / "1f" / "trackers") == (taken == "no") == (not caplog.text)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.geteuid()
    assert list((tmp_path / "victim").iterdir()) == []
    assert taken == "no" or list(shared.iterdir()) == []
