"""What has been reported is there after a power failure, whenever it comes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow.fs
import pytest

from elastic_ray.checkpoints.automatic import CorruptStateError, delete_others, state_files
from elastic_ray.checkpoints.line_files import LineFile
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.checkpoints.sharded.saver import write_state
from elastic_ray.state.resume_point import ResumePoint
from placement.storage.private_files import open_whole, replace_file
from tests.job.power_loss import PowerLoss

private = pytest.mark.parametrize("private", [True, False])


def made(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("root", "scratch"):
        (tmp_path / name).mkdir()
    return tmp_path / "root", tmp_path / "scratch"


@private
def test_a_reported_checkpoint_is_there_or_the_one_before(tmp_path: Path, private: bool) -> None:
    root, scratch = made(tmp_path)
    reported = -1

    def check(left: Path) -> None:
        storage = RunStorage(str(left / "runs" / "a"))
        stored = storage.stored_checkpoints()
        assert max((each.index for each in stored), default=-1) >= reported
        for each in stored:  # none that counts is a part of one
            assert (Path(each.path) / "model.pt").read_bytes() == b"weights" * (each.index + 1)
            assert (Path(each.path) / "deep" / "rest.pt").read_bytes() == b"rest"

    loss = PowerLoss(root, scratch, check)
    (source := tmp_path / "source").mkdir()
    (source / "deep").mkdir()
    (source / "deep" / "rest.pt").write_bytes(b"rest")
    with loss.watched() as filesystem:
        storage = RunStorage(str(root / "runs" / "a"), filesystem, private=private)
        storage.create()
        for index in range(3):
            (source / "model.pt").write_bytes(b"weights" * (index + 1))
            storage.persist_checkpoint(source, index)
            reported = index
            loss.fail()
            if index:
                storage.delete_checkpoint(f"{storage.path}/checkpoint_{index - 1:06d}")
    assert loss.states > 100


def test_an_automatic_state_is_there_or_the_one_before(tmp_path: Path) -> None:
    root, scratch = made(tmp_path)
    written = 0

    def check(left: Path) -> None:
        storage = RunStorage(str(left))
        for state in state_files(storage):
            try:
                assert open_checkpoint(storage, state) == {"run": {"steps": state.steps}}
            except CorruptStateError:
                continue  # the job continues from the one before
            assert state.steps >= written
            return
        assert not written

    loss = PowerLoss(root, scratch, check)
    with loss.watched() as filesystem:
        storage = RunStorage(str(root), filesystem)
        for steps in range(1, 4):
            state = write_state(storage, {"run": {"steps": steps}}, ResumePoint(epoch=0, steps=steps))
            written = steps
            loss.fail()
            delete_others(storage, state, keep=1)
    assert loss.states > 50


def test_lines_that_were_added_stay(tmp_path: Path) -> None:
    root, scratch = made(tmp_path)
    added: list[str] = []

    def check(left: Path) -> None:
        lines = list(LineFile(pyarrow.fs.LocalFileSystem(), str(left / "lines.jsonl"), private=True).read())
        assert lines[: len(added)] == added

    loss = PowerLoss(root, scratch, check)
    with loss.watched() as filesystem:
        file = LineFile(filesystem, str(root / "lines.jsonl"), private=True)
        for number in range(3):
            file.append([f"{number} a", f"{number} b"])
            added += [f"{number} a", f"{number} b"]
            loss.fail()


def test_a_file_is_replaced_wholly_or_not_at_all(tmp_path: Path) -> None:
    root, scratch = made(tmp_path)
    path, allowed = str(root / "note"), {b"first"}

    def check(left: Path) -> None:
        with open_whole(pyarrow.fs.LocalFileSystem(), str(left / "note")) as stream:
            assert stream.readall() in allowed

    replace_file(pyarrow.fs.LocalFileSystem(), path, b"first", private=True)
    loss = PowerLoss(root, scratch, check)
    with loss.watched() as filesystem:
        allowed.add(b"second")
        replace_file(filesystem, path, b"second", private=True)
        allowed.remove(b"first")
        loss.fail()


def test_what_crash_left_stays_until_the_next_is_whole(tmp_path: Path) -> None:
    """Where a move does not replace, the file is deleted first; the next one's bytes must not go into its only copy."""
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    (tmp_path / "note.part").write_bytes(b"first")
    with pytest.raises(TypeError):
        replace_file(remote, "note", None, private=True)
    assert (tmp_path / "note").read_bytes() == b"first"


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_cannot_sync_are_written_to(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    local = pyarrow.fs.LocalFileSystem()
    replace_file(local, str(tmp_path / "note"), b"first", private=True)
    lines = LineFile(local, str(tmp_path / "lines"), private=True)
    lines.append(["a"])
    assert list(lines.read()) == ["a"]
