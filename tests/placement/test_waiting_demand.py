"""A cluster of Ray's autoscaler brings nodes for a job without a word about autoscaling."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, tempfile, time
from examples.autoscaling import NODE_TYPES, LocalAutoscalingCluster, submit
import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from placement import get_or_create_allocator

def wanted():
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    return [d for d in status.resource_demands.cluster_constraint_demand if d.bundles_by_count]

def wait(reached, limit_s, what):
    begun = time.monotonic()
    while not reached():
        assert time.monotonic() - begun < limit_s, what
        time.sleep(0.1)
    return time.monotonic() - begun

with (
    LocalAutoscalingCluster(NODE_TYPES, idle_s=60.0) as cluster,
    tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
):
    job = submit("alone", folder, workers=(1, 2), epochs=1, spot="prefer")
    allocator = get_or_create_allocator()
    wait(lambda: "alone" in ray.get(allocator.snapshot.remote()).jobs, 120.0, "the allocator knows the job")
    print(f"asked after {wait(wanted, 10.0, 'nodes are asked for within 10 s'):.1f} s")
    job.result(timeout=240)
    wait(lambda: not wanted(), 30.0, "what is not needed any more is asked for no more")
    print("done")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rays_autoscaler_brings_node_for_a_job_that_waits() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert told.stdout.endswith("done\n"), told.stdout + told.stderr
