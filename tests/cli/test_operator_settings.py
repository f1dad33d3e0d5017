"""``elastic-ray allocator apply``, ``show`` and ``diff`` against a cluster on which a job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

import elastic_ray as er
from placement.allocator.actor import get_or_create_allocator
from placement.ray_cluster.named_actors import ALLOCATOR, find_actor
from tests.cli.commands import run
from tests.job.jobs import start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000), pytest.mark.thorough]


def test_settings_change_while_job_runs_and_outlast_the_allocator(ray_cluster: Any, tmp_path: Path) -> None:
    get_or_create_allocator("fair_share")  # what a crowded machine's speeds are worth is no matter of this test
    file = tmp_path / "cluster-policy.yaml"
    shown = yaml.safe_load(run(ray_cluster, "allocator", "show").stdout)
    assert shown == {"tenants": {}, "priorities": {}, "autoscaling": "auto", "page": False}
    tenant = er.SchedulingConfig(tenant="vision")
    handle = start(tmp_path, workers=(1, 3), epochs=100_000, scheduling=tenant)
    wait_until(lambda: handle.status().workers > 1, handle)

    file.write_text("tenants: {vision: {quota: {GPUS: 1}}}")
    assert "no node has the resource 'GPUS'" in run(ray_cluster, "allocator", "apply", str(file), code=1).stderr
    file.write_text("tenants: {vision: {qouta: {CPU: 1}}}")
    assert "did you mean 'quota'?" in run(ray_cluster, "allocator", "diff", str(file), code=2).stderr
    file.write_text("tenants: {vision: {quota: {CPU: 1}}}\nautoscaling: off")
    assert "+    quota:" in run(ray_cluster, "allocator", "diff", str(file)).stdout
    assert handle.status().workers > 1
    assert "+autoscaling: 'off'" in run(ray_cluster, "allocator", "apply", str(file)).stdout
    assert "nothing would change" in run(ray_cluster, "allocator", "diff", str(file)).stdout
    wait_until(lambda: handle.status().workers == 1, handle)

    ray.kill(find_actor(ALLOCATOR), no_restart=False)
    assert "CPU: 1" in run(ray_cluster, "allocator", "show").stdout
    file.write_text("")
    run(ray_cluster, "allocator", "apply", str(file))
    wait_until(lambda: handle.status().workers > 1, handle)
    handle.stop(now=True)
