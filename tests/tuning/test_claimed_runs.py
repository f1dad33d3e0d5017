"""Each start of a trial has a directory that no other start has had."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow.fs

from tuning.trial_job import claim_run

LOCAL = pyarrow.fs.LocalFileSystem()


def claim(folder: Path, last: str = "") -> str:
    return Path(claim_run(LOCAL, str(folder), last, private=True)).name


def test_numbers_of_deleted_runs_are_not_used_again(tmp_path: Path) -> None:
    trial = tmp_path / "trial"
    assert [claim(trial) for _ in range(3)] == ["run_00", "run_01", "run_02"]
    (trial / "run_00").rmdir()
    assert claim(trial) == "run_03"
    (trial / "run_03").rmdir()
    assert claim(trial, last="run_03") == "run_04"
    (trial / "run_99").mkdir()
    (trial / "run_of_mine").mkdir()
    assert claim(trial) == "run_100"
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), LOCAL)
    assert claim_run(remote, "trial", "", private=True) == "trial/run_101"


def test_of_starts_at_same_time_each_has_its_own(tmp_path: Path) -> None:
    claimed: list[str] = []
    threads = [threading.Thread(target=lambda: claimed.append(claim(tmp_path / "trial"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == [f"run_{number:02d}" for number in range(16)]
