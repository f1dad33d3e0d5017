"""A run's directory that a job of another cluster may be using."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.fs
import pytest

from elastic_ray.checkpoints.run_directory import ALIVE_FILE, EVENTS_FILE, SUBMISSION_FILE, RunStorage
from elastic_ray.driver.other_clusters import refuse_running_elsewhere
from elastic_ray.errors import JobNameTakenError
from elastic_ray.events import EventKind, JobEvent
from elastic_ray.record.submitted import SubmittedJob
from tests.job.shaky_storage import ShakyStorage
from tests.local_cluster import free_port

OURS = SubmittedJob(
    job="digits", storage="/runs/digits", session="ours", address="10.0.0.2:6379", submitted_s=0.0, host="here"
)


def theirs(**changed: object) -> SubmittedJob:
    told = {"session": "theirs", "address": "10.0.0.1:6379", "submitted_s": time.time() - 30.0, "host": "there"}
    return dataclasses.replace(OURS, **{**told, **changed})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStorage:
    monkeypatch.setattr("elastic_ray.driver.other_clusters._POLL_S", 0.1)
    storage = RunStorage(str(tmp_path / "digits"))
    storage.create()
    storage.write_submission(theirs().to_json())
    storage.write_alive()
    return storage


@contextlib.contextmanager
def living(run: RunStorage, time_s: Callable[[], str] | None = None) -> Iterator[None]:
    """Write what the run's controller writes, faster; or other times."""
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(0.02):
            if time_s is None:
                run.write_alive()
            else:
                (Path(run.path) / ALIVE_FILE).write_text(time_s())

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def check(run: RunStorage, ours: SubmittedJob = OURS, watch_s: float = 60.0) -> float:
    """Return how long the check took [s]."""
    begin_s = time.monotonic()
    refuse_running_elsewhere(run, ours, timeout_s=60.0, watch_s=watch_s)
    return time.monotonic() - begin_s


def test_a_job_of_another_cluster_keeps_its_directory(run: RunStorage) -> None:
    before = {path.name: path.read_bytes() for path in Path(run.path).iterdir() if path.name != ALIVE_FILE}
    with living(run), pytest.raises(JobNameTakenError) as refused:
        check(run)
    for told in (
        run.path,
        "at 10.0.0.1:6379",
        "last seen alive at 2",
        "RunConfig(name)",
        "storage_path",
        SUBMISSION_FILE,
    ):
        assert told in str(refused.value)
    assert {path.name: path.read_bytes() for path in Path(run.path).iterdir() if path.name != ALIVE_FILE} == before


def test_clocks_need_not_agree(run: RunStorage) -> None:
    times = itertools.count(time.time() - 100.0, -1.0)
    with living(run, lambda: str(next(times))), pytest.raises(JobNameTakenError):
        check(run)


def test_a_lost_job_is_continued_after_its_silence(run: RunStorage) -> None:
    assert check(run, watch_s=0.3) >= 0.3
    run.write_submission(theirs(submitted_s=time.time() - 3600.0).to_json())
    (Path(run.path) / ALIVE_FILE).write_text(str(time.time() - 3000.0))
    assert check(run) < 30.0, "its silence is long enough already"


def test_a_new_head_in_its_place_waits_not(run: RunStorage) -> None:
    run.write_submission(theirs(host="here", address=OURS.address).to_json())
    with living(run):
        assert check(run) < 30.0
    run.write_submission(theirs(host="here", address=f"127.0.0.1:{free_port()}").to_json())
    assert check(run) < 30.0, "nothing answers on this very machine"


def test_another_machines_loopback_address_proves_nothing(run: RunStorage) -> None:
    address = f"127.0.0.1:{free_port()}"
    for host, ours in (("there", OURS), ("there", dataclasses.replace(OURS, address=address)), ("", OURS)):
        run.write_submission(theirs(address=address, host=host).to_json())
        with living(run), pytest.raises(JobNameTakenError):
            check(run, ours)


def test_two_clusters_of_one_machine_are_told_apart(run: RunStorage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        run.write_submission(theirs(host="here", address=f"127.0.0.1:{head.getsockname()[1]}").to_json())
        with living(run), pytest.raises(JobNameTakenError):
            check(run)
        assert check(run, watch_s=0.3) >= 0.3, "the cluster lives, but not the job"


def test_ended_jobs_and_new_directories_are_free(run: RunStorage, tmp_path: Path) -> None:
    with living(run):
        assert check(run, dataclasses.replace(OURS, session="theirs")) < 30.0, "its own cluster's"
    end = JobEvent(kind=EventKind.FINISHED, time_s=time.time(), from_workers=1, to_workers=0, reason="")
    run.events.append([end.to_json()])
    assert check(run) < 30.0
    assert check(RunStorage(str(tmp_path / "new"))) < 30.0
    run.write_submission("{}")
    assert check(run) < 30.0, "no submission"


@pytest.mark.parametrize("stored", ["nan", "inf", "", "no time"])
def test_a_damaged_sign_of_life_is_none(run: RunStorage, stored: str) -> None:
    Path(run.path, ALIVE_FILE).write_text(stored)
    assert check(run, watch_s=0.3) >= 0.0, "a value that never equals itself is no life"


class Forbidding(ShakyStorage):
    """Another user's files, of which one may not be read."""

    forbidden = ""

    def open_input_stream(self, path: str) -> object:
        if path.endswith(self.forbidden):
            raise PermissionError(13, "Permission denied", path)
        return super().open_input_stream(path)

    open_input_file = open_input_stream


@pytest.mark.parametrize("name", [SUBMISSION_FILE, ALIVE_FILE, EVENTS_FILE])
def test_unreadable_files_of_another_user_prove_no_end(run: RunStorage, name: str) -> None:
    run.events.append(["{}"])
    files = Forbidding(f"{run.path}/none")
    files.forbidden = name
    shared = RunStorage(run.path, pyarrow.fs.PyFileSystem(files))
    with pytest.raises(PermissionError, match=r"may be in use by another user's job, .*RunConfig\(name\)"):
        check(shared)
