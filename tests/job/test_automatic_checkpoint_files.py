"""Automatic checkpoints as files, and how often they are made; no Ray."""

from __future__ import annotations

import hashlib
import io
import math
import os
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.checkpoints import checked_files
from elastic_ray.checkpoints.automatic import CorruptStateError, delete_others, delete_states, state_files
from elastic_ray.checkpoints.checked_files import CheckedStream
from elastic_ray.checkpoints.interval import PRIOR_MEAN_TIME_S, checkpoint_interval_s, mean_time_between_losses_s
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.manifest import part_name
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.checkpoints.sharded.saver import write_state
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.state.tree import UnsafeStateError


def trees(value: float = 1.0) -> dict[str, Any]:
    return {
        "model/0": {"weight": torch.full((3, 4), value), "steps": torch.tensor(7)},
        "lr_scheduler/0/0": {"milestones": {3: 1}, "last": [1, None, "x", 2.5, (1, 2)]},
        "run": {"epoch": 1, "sums": {(0, 1): {"loss": 0.25}}, "passes": [{"position": 3, "done": False}]},
        "shape": {"atomic_bsz": 8, "accum_steps": 1},
    }


def point(steps: int) -> ResumePoint:
    return ResumePoint(epoch=0, steps=steps, samples_left=5)


@pytest.fixture(params=["local", "elsewhere"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> RunStorage:
    """``elsewhere`` is a file system without renames, as object stores are."""
    if request.param == "local":
        return RunStorage(str(tmp_path / "run"))
    below = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    return RunStorage("run", below)


def test_what_was_written_is_read_and_newest_comes_first(storage: RunStorage) -> None:
    written = [write_state(storage, trees(steps), point(steps)) for steps in (5, 100, 20)]
    found = state_files(storage)
    assert [state.steps for state in found] == [100, 20, 5] and list(found) == [written[i] for i in (1, 2, 0)]
    read = open_checkpoint(storage, found[1])
    assert torch.equal(read["model/0"]["weight"], torch.full((3, 4), 20.0))
    assert {key: read[key] for key in ("run", "shape", "lr_scheduler/0/0")} == {
        key: trees()[key] for key in ("run", "shape", "lr_scheduler/0/0")
    }
    delete_others(storage, found[0], keep=2)
    assert [state.steps for state in state_files(storage)] == [100, 20]
    delete_states(storage)
    delete_states(storage)  # nothing there: no error
    assert state_files(storage) == ()


def test_a_changed_or_torn_state_is_recognised(storage: RunStorage, tmp_path: Path) -> None:
    state = write_state(storage, trees(), point(5))
    path = tmp_path / state.path / part_name(0)
    content = path.read_bytes()
    for bad, why in ((content[:-1], "bytes"), (content[:40] + b"\1" + content[41:], "checksum")):
        path.write_bytes(bad)
        with pytest.raises(CorruptStateError, match=why):
            open_checkpoint(storage, state)
    path.unlink()
    with pytest.raises(CorruptStateError, match="cannot be read"):
        open_checkpoint(storage, state)
    (tmp_path / f"{state.path}.json").write_text('{"sha256": ')
    assert state_files(storage) == ()


def test_one_given_up_half_way_does_not_count(storage: RunStorage, tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        write_state(storage, trees(), point(5), go_on=lambda: False)
    assert state_files(storage) == () and list((tmp_path / "run" / "automatic").iterdir()) == []


def test_equal_one_takes_nothing_away_until_it_is_there(storage: RunStorage) -> None:
    first = write_state(storage, trees(1.0), point(5))
    with pytest.raises(InterruptedError):
        write_state(storage, trees(2.0), point(5), go_on=lambda: False)
    assert state_files(storage) == (first,)
    assert torch.equal(open_checkpoint(storage, first)["model/0"]["weight"], torch.ones(3, 4))
    second = write_state(storage, trees(2.0), point(5))
    delete_others(storage, second, keep=2)
    assert state_files(storage) == (second,)
    assert torch.equal(open_checkpoint(storage, second)["model/0"]["weight"], torch.full((3, 4), 2.0))


def test_a_state_is_on_disk_before_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, noted, fsync = list[int](), list[int](), os.fsync

    def synced(file: int) -> None:
        there.append(len([path for path in (tmp_path / "automatic").rglob("*") if path.is_file()]))
        noted.append(len(list((tmp_path / "automatic").glob("*.json"))))
        fsync(file)

    monkeypatch.setattr(os, "fsync", synced)
    write_state(RunStorage(str(tmp_path)), trees(), point(5))
    assert sorted(there) == there and max(there) == 4, "a part, torch's metadata, the manifest, and last the note"
    assert all(number == (files == 4) for files, number in zip(there, noted, strict=True)) and there.count(4) > 1


def test_those_of_course_that_was_left_take_no_place(storage: RunStorage) -> None:
    """Two corrupt ones, 98 and 100, and the job continues from a reported checkpoint at 50."""
    kept = []
    for steps in (98, 100, 52, 54, 56):
        delete_others(storage, write_state(storage, trees(), point(steps)), keep=2)
        kept.append([state.steps for state in state_files(storage)])
    assert kept == [[98], [100, 98], [52], [54, 52], [56, 54]]


class Thing:
    """Something that only its own code can build."""


def test_what_only_running_code_loads_is_refused(storage: RunStorage) -> None:
    with pytest.raises(UnsafeStateError, match=r"plain values: \['lr_scheduler/0/0'\]\['thing'\] is a"):
        write_state(storage, {**trees(), "lr_scheduler/0/0": {"thing": Thing()}}, point(5))
    assert state_files(storage) == ()


def test_intervals_are_young_s_and_daly_s() -> None:
    # Daly 2006, eq. 13: sqrt(2 x 1 s x 5000 s) - 1 s
    assert checkpoint_interval_s(1.0, 5000.0) == pytest.approx(200.0)  # half a percent binds: 99 s would be best
    assert checkpoint_interval_s(0.1, 50_000.0) == pytest.approx(math.sqrt(10_000.0) - 0.1)
    assert checkpoint_interval_s(0.0, 1e5) == 10.0
    assert mean_time_between_losses_s(0, 0) == PRIOR_MEAN_TIME_S
    assert mean_time_between_losses_s(1, PRIOR_MEAN_TIME_S) == PRIOR_MEAN_TIME_S


@given(cost=st.floats(0, 1e4), losses=st.floats(0, 1e4), observed=st.floats(0, 1e7))
def test_intervals_are_bounded_and_shorter_for_jobs_lost_often(cost: float, losses: float, observed: float) -> None:
    interval = checkpoint_interval_s(cost, mean_time_between_losses_s(losses, observed))
    assert 10.0 <= interval <= 3600.0
    assert interval == 3600.0 or cost / interval <= 0.00501
    more = checkpoint_interval_s(cost, mean_time_between_losses_s(losses + 1, observed))
    assert more <= interval + 1e-9 or cost > mean_time_between_losses_s(losses + 1, observed) / 2


def test_a_large_file_reaches_the_disk_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_files, "CHUNK_BYTES", 4)
    monkeypatch.setattr(checked_files, "_SYNC_BYTES", 8)
    raw, reached = io.BytesIO(), list[int]()
    stream = CheckedStream(raw, lambda: True, lambda: reached.append(raw.tell()))
    stream.write(b"x" * 19)
    stream.write(b"y" * 6)
    assert reached == [8, 16, 25] and stream.size == 25
    assert stream.digest() == hashlib.sha256(raw.getvalue()).hexdigest()
