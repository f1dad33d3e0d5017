"""Files that only their user can read, whatever the umask says, and without touching it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pyarrow.fs
import pytest

from placement.storage.private_files import make_directory, open_append, open_output

LOCAL = pyarrow.fs.LocalFileSystem()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def generous_umask() -> object:
    before = os.umask(0o002)
    yield
    assert os.umask(before) == 0o002, "the process's own umask is left alone"


def test_what_we_make_is_private_and_what_was_there_above_it_keeps_its_mode(tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir(mode=0o775)
    make_directory(LOCAL, str(there / "runs" / "a"), private=True)
    assert (mode(there), mode(there / "runs"), mode(there / "runs" / "a")) == (0o775, 0o700, 0o700)
    make_directory(LOCAL, str(there / "shared"), private=False)
    assert mode(there / "shared") == 0o775


def test_a_directory_and_files_of_our_own_that_are_there_are_tightened(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir(mode=0o775)
    (file := run / "events.jsonl").write_text("x\n")
    assert mode(file) == 0o664
    make_directory(LOCAL, str(run), private=True)
    os.close(open_append(str(file), private=True))
    assert (mode(run), mode(file), file.read_text()) == (0o700, 0o600, "x\n")
    with open_output(LOCAL, str(run / "new"), private=True) as stream:
        stream.write(b"y")
    assert (mode(run / "new"), (run / "new").read_bytes()) == (0o600, b"y")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_keeps_its_mode(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir(mode=0o775)
    os.chown(run, 12345, -1)
    make_directory(LOCAL, str(run), private=True)
    assert mode(run) == 0o775


def test_a_file_in_the_place_of_a_directory_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(NotADirectoryError):
        make_directory(LOCAL, str(tmp_path / "run"), private=True)
