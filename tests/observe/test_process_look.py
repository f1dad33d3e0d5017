"""What a worker's process prints and where its threads are: bounded, and refused in one line where it cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ray.observe.process_look import MOST_BYTES, read_logs, read_stack


def test_logs_are_the_last_lines_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "worker-ab-01000000-41.out").write_text("other\n")
    (tmp_path / "worker-ab-01000000-4.out").write_bytes(b"first\n" + b"x" * MOST_BYTES + b"\nlast \xff\n")
    (tmp_path / "worker-ab-01000000-4.err").write_text("Traceback\n")
    text, refused = read_logs(tmp_path, 4)
    assert not refused and "first" not in text and "other" not in text
    assert text.startswith("--- stdout, the last 64 KiB ---") and "last \ufffd\n--- stderr ---\nTraceback" in text
    assert len(text) < MOST_BYTES + 200
    assert read_logs(tmp_path, 5) == ("", "Ray keeps no files of what it prints; it may have ended")


@pytest.mark.thorough
def test_a_stack_names_functions_and_a_refusal_its_cause() -> None:
    code = "import time\ndef waits_here():\n    print('up', flush=True)\n    time.sleep(60)\nwaits_here()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        text, refused = read_stack(process.pid)
        assert "waits_here" in text or "ptrace" in refused, refused
        if os.geteuid() == 0 and shutil.which("setpriv"):
            ask = f"from elastic_ray.observe.process_look import read_stack; print(read_stack({process.pid})[1])"
            less = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
            told = subprocess.run([*less, sys.executable, "-c", ask], capture_output=True, text=True, timeout=300)
            assert "its node does not allow ptrace" in told.stdout, told.stdout + told.stderr
        process.kill()
    assert "py-spy cannot read it" in read_stack(process.pid)[1]
