"""Processes of a machine that start at the same time take turns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_ray.worker.warm_up import start_slot

_START = """
import sys, time
from pathlib import Path
from elastic_ray.worker.warm_up import start_slot
folder, slots = Path(sys.argv[1]), int(sys.argv[2])
with start_slot(folder / "slots", slots=slots) as slot:
    begun = time.monotonic()
    print("holds", slot, flush=True)
    time.sleep(float(sys.argv[3]))
    print(begun, time.monotonic(), flush=True)
"""


def start(folder: Path, *, slots: int, hold_s: float) -> subprocess.Popen[str]:
    """A process that takes a slot and holds it."""
    command = [sys.executable, "-c", _START, str(folder), str(slots), str(hold_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_no_more_start_at_once_than_there_are_slots(tmp_path: Path) -> None:
    spans = []
    for process in [start(tmp_path, slots=2, hold_s=0.5) for _ in range(4)]:
        out, _ = process.communicate(timeout=60)
        begun, ended = map(float, out.splitlines()[1].split())
        spans.append((begun, ended))
    assert max(sum(begun <= at < ended for begun, ended in spans) for at, _ in spans) == 2


def test_a_process_that_dies_gives_its_slot_back(tmp_path: Path) -> None:
    process = start(tmp_path, slots=1, hold_s=600.0)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds 0\n"
    os.kill(process.pid, signal.SIGKILL)
    with start_slot(tmp_path / "slots", slots=1, timeout_s=60.0) as slot:
        assert slot == 0
    process.wait(timeout=60)


def test_who_waits_in_vain_starts_beside_the_others(tmp_path: Path) -> None:
    with start_slot(tmp_path, slots=1), start_slot(tmp_path, slots=1, timeout_s=0.1) as slot:
        assert slot is None


def test_an_error_within_gives_the_slot_back(tmp_path: Path) -> None:
    with pytest.raises(ImportError), start_slot(tmp_path, slots=1):
        raise ImportError
    with start_slot(tmp_path, slots=1, timeout_s=0.0) as slot:
        assert slot == 0


def test_where_no_file_can_be_made_processes_start_without_turns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    since = time.monotonic()
    with start_slot(tmp_path / "file" / "slots", slots=1) as slot:
        assert slot is None
    assert time.monotonic() < since + 10.0


def test_nothing_is_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to(tmp_path / "elsewhere")
    with start_slot(tmp_path, slots=1) as slot:
        assert slot is None
    assert not (tmp_path / "elsewhere").exists()
