"""Processes of a machine that start at the same time take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_ray.worker.warm_up import start_slot

_START = """
import sys
from pathlib import Path
from elastic_ray.worker.warm_up import start_slot
with start_slot(Path(sys.argv[1]), slots=int(sys.argv[2])) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


@contextmanager
def starting(folder: Path, slots: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has taken a slot, and holds it to the end."""
    command = [sys.executable, "-c", _START, str(folder), str(slots)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "True\n"
            yield process
        finally:
            process.kill()


def test_starts_keep_to_slots_and_the_dead_return_theirs(tmp_path: Path) -> None:
    with starting(tmp_path, 2) as process, starting(tmp_path, 2):
        with start_slot(tmp_path, slots=2, timeout_s=0.1) as held:
            assert not held, "it starts beside the others"
        process.kill()
        with start_slot(tmp_path, slots=2, timeout_s=60.0) as held:
            assert held


def test_an_error_within_gives_the_slot_back(tmp_path: Path) -> None:
    with pytest.raises(ImportError), start_slot(tmp_path, slots=1):
        raise ImportError
    with start_slot(tmp_path, slots=1, timeout_s=0.0) as held:
        assert held


def test_without_a_file_processes_start_without_turns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with start_slot(tmp_path / "file" / "slots", slots=1) as held:
        assert not held


def test_nothing_is_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to(tmp_path / "elsewhere")
    with start_slot(tmp_path, slots=1) as held:
        assert not held
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_nobody_waits_for_slots_that_another_user_could_hold(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir(mode=0o777)
    os.chown(folder, 12345, 12345)
    with start_slot(folder, slots=1) as held:
        assert not held
    assert not list(folder.iterdir())
