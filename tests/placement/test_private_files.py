"""Files that only their user can read, whatever the umask says, and without touching it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
import pytest

from placement.storage.private_files import (
    ForeignDirectoryError,
    has_neighbours,
    make_directory,
    make_own,
    open_append,
    open_output,
    open_to_others,
)

LOCAL = pyarrow.fs.LocalFileSystem()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def generous_umask() -> object:
    before = os.umask(0o002)
    yield
    assert os.umask(before) == 0o002, "the process's own umask is left alone"


def test_what_we_make_is_private_what_was_above_stays(tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir(mode=0o775)
    make_directory(LOCAL, str(there / "runs" / "a"), private=True)
    assert (mode(there), mode(there / "runs"), mode(there / "runs" / "a")) == (0o775, 0o700, 0o700)
    make_directory(LOCAL, str(there / "shared"), private=False)
    assert mode(there / "shared") == 0o775


def test_directories_and_files_of_our_own_are_tightened(tmp_path: Path) -> None:
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


def test_file_in_the_place_of_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(NotADirectoryError):
        make_directory(LOCAL, str(tmp_path / "run"), private=True)


OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second account")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all accounts can come to."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def replaces(folder: Path) -> bool:
    """Whether a second account can put a file of its own in the place of one of this user's."""
    file = folder / "code.py"
    file.write_text("ours")
    command = ["/bin/sh", "-c", 'rm -f "$0" && echo theirs > "$0"', str(file)]
    return subprocess.run(command, user=OTHER, group=OTHER, extra_groups=[], capture_output=True).returncode == 0


@as_root
@pytest.mark.parametrize(
    ("above", "mode", "is_open"),
    [
        (0o755, 0o777, True),  # as Ray makes them
        (0o711, 0o777, True),
        (0o700, 0o777, False),  # below a directory of its user's own
        (0o755, 0o1777, False),
        (0o755, 0o755, False),
        (0o755, 0o700, False),
        (0o744, 0o777, False),
    ],
)
def test_a_second_account_can_replace_what_is_said_open(shared: Path, above: int, mode: int, is_open: bool) -> None:
    (folder := shared / "ray" / "session").mkdir(parents=True)
    folder.chmod(mode)
    folder.parent.chmod(above)
    assert open_to_others(str(folder)) is is_open
    assert replaces(folder) is is_open


@as_root
def test_a_folder_whose_parent_can_be_replaced_is_open(shared: Path) -> None:
    (folder := shared / "ray" / "session").mkdir(parents=True)
    folder.parent.chmod(0o777)
    folder.chmod(0o755)
    assert open_to_others(str(folder))


@as_root
def test_others_are_those_who_have_processes_here() -> None:
    with subprocess.Popen(["/bin/cat"], user=OTHER, group=OTHER, stdin=subprocess.PIPE, cwd="/") as process:
        assert has_neighbours()
        process.communicate(b"")


@as_root
@pytest.mark.parametrize("made_by_another", ["directory", "link", "level", "file"])
def test_folder_that_another_account_has_made_first_is_refused(shared: Path, made_by_another: str) -> None:
    shared.chmod(0o1777)
    (ours := shared / "somewhere").mkdir(mode=0o700)
    folder = shared / "elastic_ray_0"
    if made_by_another == "link":
        folder.symlink_to(ours)
    elif made_by_another == "file":
        folder.write_text("")
    else:
        (folder if made_by_another == "directory" else folder / "run").mkdir(parents=True)
        os.chown(folder if made_by_another == "directory" else folder / "run", OTHER, OTHER)
    with pytest.raises(ForeignDirectoryError, match=r"must be a directory of this user \(uid 0\)"):
        make_own(str(folder / "run" / "trackers"), str(shared))
    assert list(ours.iterdir()) == []


def test_own_folders_are_made_private_on_each_level(tmp_path: Path) -> None:
    (first := tmp_path / "elastic_ray").mkdir(mode=0o775)
    make_own(str(first / "run" / "trackers"), str(tmp_path))
    assert {mode(each) for each in (first, first / "run", first / "run" / "trackers")} == {0o700}
    make_own(str(first / "run" / "trackers"), str(tmp_path))
