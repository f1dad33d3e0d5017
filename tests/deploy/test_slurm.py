"""``deploy/slurm``: a node that Slurm takes is drained first. ``srun`` is a stand-in that runs its command here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.local_cluster import free_port  # and Ray's settings for tests, and a folder of their own

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
PROGRAMS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done\nexec "$@"',
    "ray": f'exec {sys.executable} -m ray.scripts.scripts "$@"',
    "elastic-ray": f'exec {sys.executable} -m elastic_ray.cli "$@"',
}
# A job on the head and on the node; Slurm takes the node.
DRIVER = """
import os, signal, subprocess, sys, time
import ray, ray.train
import elastic_ray as er
from tests.job import traced

def wait_until(condition, what):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)

folder, script = sys.argv[1:]
ray.init(log_to_driver=False)
with open(folder + "/node.log", "wb") as log:
    node = subprocess.Popen(["bash", script], stdout=log, stderr=log, start_new_session=True)
try:
    wait_until(lambda: ray.cluster_resources().get("slot") == 2, "two nodes")
    handle = er.ElasticTrainer(
        traced.train,
        train_loop_config={"trace": folder + "/trace", "epochs": 10_000, "pause_s": 0.03},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"slot": 1}),
        run_config=ray.train.RunConfig(name="moved", storage_path=folder + "/runs"),
    ).submit()
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, "two workers")
    node.send_signal(signal.SIGTERM)
    wait_until(lambda: handle.status().workers == 1, "one worker")
    step = handle.status().step
    wait_until(lambda: handle.status().step > step + 10, "training continues")
    print("exit code:", node.wait(timeout=120))
    handle.stop()
    handle.result()
    print("kinds:", *(event.kind.value for event in handle.events()))
finally:
    if node.poll() is None:
        os.killpg(node.pid, signal.SIGKILL)
"""

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_script_is_readable_by_bash_and_asks_slurm_first(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    asked = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert asked and max(asked) < min(commands), "Slurm reads no option after the first command"


def told(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in folder.glob("*.log"))


@pytest.mark.thorough
def test_a_node_that_slurm_takes_is_drained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job moves off it without a failure, and the script ends before Slurm would kill it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "trace").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    address_file = tmp_path / "head"
    port = str(free_port())
    for name, value in {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ELASTIC_RAY_HEAD": str(address_file),
        "RAY_PORT": port,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # not the loopback alone: Ray wants it for a second node
        "RAY_START_OPTIONS": '--include-dashboard=false --resources={"slot":1}',
        "SLURM_JOB_ID": "4711",
    }.items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "head.log").open("wb") as log:
        head = subprocess.Popen(["bash", str(SCRIPTS / "head.sbatch")], stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not address_file.exists():
            assert time.monotonic() < deadline, told(tmp_path)
            time.sleep(0.1)
        monkeypatch.setenv("RAY_ADDRESS", address_file.read_text().strip())
        monkeypatch.setenv("RAY_START_OPTIONS", '--num-cpus=0 --resources={"slot":1}')
        driver = [sys.executable, "-c", DRIVER, str(tmp_path), str(SCRIPTS / "node.sbatch")]
        answer = subprocess.run(driver, capture_output=True, text=True, timeout=800)
        assert answer.returncode == 0, answer.stdout + answer.stderr + told(tmp_path)
        assert "exit code: 0" in answer.stdout, told(tmp_path)
        kinds = answer.stdout.rpartition("kinds: ")[2].split()
        assert "resize" in kinds and "failure" not in kinds, answer.stdout
        assert "no elastic job has workers on" in (tmp_path / "node.log").read_text()
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
