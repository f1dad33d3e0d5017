"""``deploy/slurm``: a node that Slurm takes is drained first. ``srun`` is a stand-in that runs its command here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.events import EventKind
from tests.job.jobs import kinds, start, wait_until

SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""

pytestmark = [pytest.mark.ray_cluster(num_cpus=2), pytest.mark.timeout(600)]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_a_script_is_one_that_bash_reads_and_asks_slurm_first(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    asked = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert asked and max(asked) < min(commands), "Slurm reads no option after the first command"


@pytest.mark.thorough
def test_a_node_that_slurm_takes_is_drained(ray_cluster: Any, tmp_path: Path) -> None:
    """The job moves off it without a failure, and the script ends before Slurm would kill it."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in {
        "srun": SRUN,
        "ray": f'#!/usr/bin/env bash\nexec {sys.executable} -m ray.scripts.scripts "$@"\n',
        "elastic-ray": f'#!/usr/bin/env bash\nexec {sys.executable} -m elastic_ray.cli "$@"\n',
    }.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    (tmp_path / "head").write_text(ray_cluster.address)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "ELASTIC_RAY_HEAD": str(tmp_path / "head"),
        "SLURM_JOB_ID": "4711",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # Ray's own name for 'not on the loopback alone'
        "RAY_START_OPTIONS": '--node-ip-address=127.0.0.1 --num-cpus=0 --resources={"slot":1}',
    }
    with (tmp_path / "log").open("wb") as log:
        script = subprocess.Popen(
            ["bash", str(SCRIPTS / "node.sbatch")], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        other = ray_cluster.add_node(num_cpus=0, resources={"slot": 1})
        handle = start(tmp_path, workers=(1, 2), epochs=10_000, pause_s=0.03, bundle={"slot": 1.0})
        handle.resize(2)
        wait_until(lambda: handle.status().workers == 2, handle, 120)
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=120) == 0, (tmp_path / "log").read_text()
        assert {worker.node for worker in handle.workers()} == {other.node_id}
        assert "no elastic job has workers on" in (tmp_path / "log").read_text()
        handle.stop()
        handle.result(timeout=180)
        assert EventKind.FAILURE not in kinds(handle)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
