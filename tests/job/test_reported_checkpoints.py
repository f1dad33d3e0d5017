"""A reported checkpoint that cannot be stored: the user's own mistake raises at once, storage is waited for."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import ray.train  # now, for storing imports it: a busy machine takes longer for that than storage is waited for
from fsspec.implementations.memory import MemoryFileSystem

from elastic_ray.checkpoints import reported as reported_module
from elastic_ray.checkpoints.copying import SourceError
from elastic_ray.checkpoints.reported import CheckpointNote, ReportedCheckpoints
from elastic_ray.checkpoints.run_directory import PROGRESS_FILE, SUBMISSION_FILE, RunStorage
from elastic_ray.run.current import WorkerDismissed
from elastic_ray.state.resume_point import ResumePoint
from placement.storage.storage_calls import StorageCalls
from tests.hanging_storage import HangingStorage

NOTE = CheckpointNote(resume_point=ResumePoint(epoch=1), metrics={})
PATIENCE_S = 2.5
LONG_S = 60.0  # of patience, for what does not need it


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.pt").write_bytes(b"x" * 1000)
    return tmp_path / "source"


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[RunStorage]:
    made = RunStorage(str(tmp_path / "runs" / "a"))
    made.create()
    yield made
    (tmp_path / "runs").chmod(0o700)


def reported(storage: RunStorage, timeout_s: float = LONG_S) -> ReportedCheckpoints:
    return ReportedCheckpoints(storage, StorageCalls(storage.where), timeout_s=timeout_s)


def store(checkpoints: ReportedCheckpoints, source: Path, stopping: Callable[[], bool] = lambda: False) -> Any:
    return checkpoints.store(ray.train.Checkpoint.from_directory(source), 1, NOTE, stopping)


def test_a_checkpoint_that_is_not_there_raises_at_once(storage: RunStorage, tmp_path: Path) -> None:
    begin_s = time.monotonic()
    with pytest.raises(FileNotFoundError, match=r"must be a directory, but there is none at .*/none"):
        store(reported(storage), tmp_path / "none")
    assert time.monotonic() - begin_s < LONG_S / 2


@pytest.mark.parametrize("what", ["runs/source", "model.pt"])
def test_checkpoint_that_may_not_be_read_raises_at_once(storage: RunStorage, tmp_path: Path, what: str) -> None:
    remote = HangingStorage(tmp_path)
    (remote.root / "runs" / "source").mkdir(parents=True)
    (remote.root / "runs" / "source" / "model.pt").write_text("x")
    remote.deny(what)
    begin_s = time.monotonic()
    with pytest.raises(PermissionError, match=rf"denied.*{what}"):
        reported(storage).store(ray.train.Checkpoint("runs/source", remote.filesystem), 1, NOTE, lambda: False)
    assert time.monotonic() - begin_s < LONG_S / 2
    assert not list(Path(storage.path).glob("*_000001*"))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "is a pipe, socket or device"),
        (lambda path: path.symlink_to("gone.pt"), "is a link to 'gone.pt', which leads nowhere"),
        (lambda path: path.symlink_to(".."), "is a link to '..', which it lies in"),
        (lambda path: path.symlink_to(path.name), "is a link to 'odd', which leads nowhere"),
    ],
    ids=["pipe", "link to nothing", "loop of directories", "loop of links"],
)
def test_what_cannot_be_copied_is_named_at_once(storage: RunStorage, source: Path, make: Any, what: str) -> None:
    (source / "inner").mkdir()
    make(source / "inner" / "odd")
    begin_s = time.monotonic()
    with pytest.raises(SourceError, match=f"source/inner/odd' {what}"):
        store(reported(storage), source)
    assert time.monotonic() - begin_s < LONG_S / 2
    assert not list(Path(storage.path).glob("*_000001*"))


def test_links_to_files_and_directories_are_copied(storage: RunStorage, source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.pt").write_bytes(b"y")
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "twice").symlink_to(tmp_path / "elsewhere")
    (source / "latest.pt").symlink_to("model.pt")
    path, problem = store(reported(storage), source)
    assert not problem
    found = {each.relative_to(path).as_posix() for each in Path(path).rglob("*.pt")}
    assert found == {"model.pt", "latest.pt", "linked/more.pt", "twice/more.pt"}


def test_storage_that_takes_no_submission_is_named(tmp_path: Path) -> None:
    run = RunStorage(str(tmp_path / "run"))
    run.create()
    (tmp_path / "run" / SUBMISSION_FILE).mkdir()  # stands for a full disk: the directory is there
    with pytest.raises(
        OSError, match=r"the run's directory '.*/run' .* cannot be written: .* set RunConfig\(storage_path"
    ):
        run.write_submission("{}")


def test_a_run_directory_that_comes_back_is_waited_for(storage: RunStorage, source: Path) -> None:
    away = Path(storage.path).with_name("away")
    os.rename(storage.path, away)
    back = threading.Timer(1.0, os.rename, (away, storage.path))
    back.start()
    path, problem = store(reported(storage), source)
    back.join()
    assert (path, problem) == (f"{storage.path}/checkpoint_000001", "")


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("how", ["missing", "denied"])
def test_a_run_directory_that_stays_away_costs_the_checkpoint(tmp_path: Path, source: Path, how: str) -> None:
    remote = HangingStorage(tmp_path)
    storage = RunStorage("runs", remote.filesystem)
    storage.create()
    if how == "missing":
        shutil.rmtree(remote.root / "runs")
    else:
        remote.deny("runs")
    checkpoints = reported(storage, PATIENCE_S)
    begin_s = time.monotonic()
    path, problem = store(checkpoints, source)
    assert time.monotonic() - begin_s >= PATIENCE_S - 1.0, "it was tried again first"
    assert path is None and "the checkpoint of report 1 was given up: " in problem
    assert ("does not see the run's directory" if how == "missing" else "denied") in problem
    begin_s = time.monotonic()
    assert store(checkpoints, source)[0] is None
    assert time.monotonic() - begin_s < PATIENCE_S, "and then once for each report"
    remote.answer()
    storage.create()
    assert store(checkpoints, source) == ("runs/checkpoint_000001", "")


def test_a_stop_does_not_wait_for_it(storage: RunStorage, source: Path) -> None:
    shutil.rmtree(storage.path)
    begin_s = time.monotonic()
    with pytest.raises(WorkerDismissed):
        store(reported(storage), source, lambda: time.monotonic() > begin_s + 0.3)
    assert time.monotonic() - begin_s < LONG_S / 2


# -- other ranks ---------------------------------------------------------------------------------------------------


def test_files_of_all_ranks_are_in_one_directory(storage: RunStorage, source: Path, tmp_path: Path) -> None:
    """The other rank may come first; files that both have are rank 0's."""
    mine = tmp_path / "other"
    (mine / "shards").mkdir(parents=True)
    (mine / "model.pt").write_bytes(b"another")
    (mine / "shards" / "rank-1.pt").write_bytes(b"y" * 10)
    problems: list[str] = []
    other = reported(storage)
    adding = threading.Thread(
        target=lambda: problems.append(other.add(ray.train.Checkpoint.from_directory(mine), 1, lambda: False))
    )
    adding.start()
    time.sleep(0.3)  # it is to wait for the other by then
    path, problem = store(reported(storage), source)
    adding.join(30)
    assert not problem and problems == [""]
    stored = Path(path)
    assert (stored / "model.pt").read_bytes() == b"x" * 1000
    assert (stored / "shards" / "rank-1.pt").read_bytes() == b"y" * 10
    assert not list(stored.rglob("*.part"))
    assert [each.index for each in storage.stored_checkpoints()] == [1]


def test_what_another_rank_reports_alone_is_told(
    storage: RunStorage, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ray.checkpoints.reported._WITHOUT_S", 0.5)
    other = reported(storage)
    checkpoint = ray.train.Checkpoint.from_directory(source)
    assert "report 3, and rank 0 has not: it is not kept" in other.add(checkpoint, 3, lambda: False)
    monkeypatch.setattr("elastic_ray.checkpoints.reported._WITHOUT_S", LONG_S)
    begin_s = time.monotonic()
    assert "report 4" in other.add(checkpoint, 4, lambda: False), "nobody waits a second time"
    assert time.monotonic() - begin_s < LONG_S / 2
    assert not storage.stored_checkpoints()


def test_rank_that_waits_for_first_ends_with_the_job(storage: RunStorage, source: Path) -> None:
    with pytest.raises(WorkerDismissed):
        reported(storage).add(ray.train.Checkpoint.from_directory(source), 1, lambda: True)


def test_another_rank_waits_as_long_as_rank_0_stores(
    storage: RunStorage, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's files take longer than a rank waits for a checkpoint that rank 0 may not have reported."""
    monkeypatch.setattr(reported_module, "_WITHOUT_S", 0.5)
    other = tmp_path / "other"
    other.mkdir()
    (other / "shard-1.pt").write_bytes(b"y")
    checkpoints = ReportedCheckpoints(storage, StorageCalls(storage.where), timeout_s=60.0)
    part = Path(storage.path) / ".part_000001_abcdef01"
    part.mkdir()

    def finish() -> None:
        time.sleep(1.0)  # a slow upload
        store(checkpoints, source)

    rank_0 = threading.Thread(target=finish)
    rank_0.start()
    assert checkpoints.add(ray.train.Checkpoint.from_directory(other), 1, lambda: False) == ""
    rank_0.join(30.0)
    assert (Path(storage.path) / "checkpoint_000001" / "shard-1.pt").exists()
    begin_s = time.monotonic()
    assert "rank 0 has not" in checkpoints.add(ray.train.Checkpoint.from_directory(other), 2, lambda: False)
    assert time.monotonic() - begin_s >= 0.5


# -- notes ---------------------------------------------------------------------------------------------------------


def indices(storage: RunStorage, *, verify: bool = True) -> list[int]:
    problems: list[str] = []
    found = storage.stored_checkpoints(problems.append, verify=verify)
    assert not problems
    return [each.index for each in found]


def test_a_note_that_lists_no_files_is_refused(storage: RunStorage, source: Path) -> None:
    note = Path(storage.persist_checkpoint(source, 1).path) / PROGRESS_FILE
    told = json.loads(note.read_text())
    del told["files"]
    note.write_text(json.dumps(told))
    problems: list[str] = []
    assert not storage.stored_checkpoints(problems.append)
    assert len(problems) == 1 and "its note does not list its files" in problems[0]


def test_checkpoint_made_from_earlier_one_has_its_own_notes(storage: RunStorage, source: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "rank-1.pt").write_bytes(b"y")
    first = storage.persist_checkpoint(source, 1)
    storage.add_to_checkpoint(other, 1)
    copy = Path(first.to_directory(str(tmp_path / "copy")))
    (copy / "rank-1.pt").write_bytes(b"of the second")
    second = storage.persist_checkpoint(copy, 2)
    assert storage.add_to_checkpoint(copy, 2) == []
    assert indices(storage) == [1, 2]
    assert not list(Path(second.path).glob(".elastic_ray_added_*"))


def test_half_a_note_of_added_files_says_nothing(storage: RunStorage, source: Path) -> None:
    stored = Path(storage.persist_checkpoint(source, 1).path)
    (stored / ".elastic_ray_added_0.json").write_text('{"files": {"rank-1.pt"')
    (stored / ".elastic_ray_added_1.json.part").write_text("{")
    assert indices(storage) == [1]


def test_two_ranks_may_add_one_file_at_same_time(storage: RunStorage, source: Path, tmp_path: Path) -> None:
    """The second rank begins while the first copies."""
    (first := tmp_path / "first").mkdir()
    (first / "shared.pt").write_bytes(b"first")
    (second := tmp_path / "second").mkdir()
    (second / "shared.pt").write_bytes(b"second!")
    stored = Path(storage.persist_checkpoint(source, 1).path)
    inner: list[Any] = []

    def go_on() -> bool:
        if not inner:
            inner.append(None)
            inner[0] = storage.add_to_checkpoint(second, 1)
        return True

    assert storage.add_to_checkpoint(first, 1, go_on=go_on) == []
    assert inner == [["shared.pt"]]
    assert (stored / "shared.pt").read_bytes() == b"second!"
    assert indices(storage) == [1]
    assert not list(stored.glob("*.part"))


def test_adding_again_tells_of_what_try_before_has_left(storage: RunStorage, source: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    for name in ("a.pt", "b.pt"):
        (other / name).write_bytes(b"y")
    stored = Path(storage.persist_checkpoint(source, 1).path)
    with pytest.raises(InterruptedError):
        storage.add_to_checkpoint(other, 1, go_on=lambda: len(list(stored.glob("*.pt"))) < 2)
    assert len(list(stored.glob("*.pt*"))) == 2, "no part is left"
    assert storage.add_to_checkpoint(other, 1) == ["a.pt", "b.pt"]
    assert storage.add_to_checkpoint(other, 1) == []
    assert indices(storage) == [1]


def test_storage_may_give_paths_in_another_form(source: Path, tmp_path: Path) -> None:
    """A run at ``runs/a`` of a directory of a file system: it gives ``/runs/a/...``."""
    (tmp_path / "base").mkdir()
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "base"), pyarrow.fs.LocalFileSystem())
    memory = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(MemoryFileSystem()))
    for filesystem in (remote, memory):
        storage = RunStorage("runs/a", filesystem)
        storage.create()
        (source / "deep").mkdir(exist_ok=True)
        (source / "deep" / "rest.pt").write_bytes(b"rest")
        storage.persist_checkpoint(source, 1)
        storage.persist_checkpoint(ray.train.Checkpoint("runs/a/checkpoint_000001", filesystem), 2)
        assert indices(storage) == [1, 2]
        with storage.filesystem.open_input_stream("runs/a/checkpoint_000002/deep/rest.pt") as stream:
            assert stream.read() == b"rest"
