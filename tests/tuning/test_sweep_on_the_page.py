"""A sweep of Ray Tune on the page, in a real browser, while it runs and from its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from ray import tune

import tuning
from tests.local_cluster import LocalCluster
from tests.observe.page.pages import chromium, dashboard, missing, read, tab, until
from tests.tuning.sweeps import fit, trainable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4}),
    pytest.mark.timeout(240),
]


def jobs_of(address: str) -> list[dict[str, Any]]:
    """What ``elastic-ray jobs --json`` prints."""
    command = [sys.executable, "-m", "elastic_ray.cli", "jobs", "--json"]
    said = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": address}, capture_output=True, check=True, timeout=60
    )
    found: list[dict[str, Any]] = json.loads(said.stdout)
    return found


def test_the_trials_of_a_sweep_are_lines_of_it(sweep_cluster: LocalCluster, tmp_path: Path) -> None:
    hold = tmp_path / "go"
    space = {"quality": tune.grid_search([1.0, 2.0]), "epochs": 4, "hold": str(hold)}
    promise = tuning.Promise(metric="score", mode="max", max_t=4, grace_period=1, reduction_factor=2)
    sweep = threading.Thread(
        target=fit, args=(tmp_path / "runs", space), kwargs={"elastic": trainable(promise=promise)}
    )
    sweep.start()
    try:
        with dashboard(address=sweep_cluster.address) as (url, _), chromium() as started, tab(started) as (page, _):
            page.goto(url)
            until(page, "document.querySelectorAll('[data-sweep]').length === 1", 120)
            until(page, "document.querySelectorAll('[data-sweep] svg rect').length >= 2", 120)
            assert "2 trials" in page.locator("[data-sweep] h3").inner_text()
            jobs = read(f"{url}api/snapshot")["jobs"]
            assert len({job["sweep"] for job in jobs}) == 1 and len(jobs) == 2
            assert all(job["job"].startswith(f"{job['sweep']}-") for job in jobs)
            rungs = "[...document.querySelectorAll('[data-rung]')].map((each) => each.textContent).join()"
            until(page, f"{rungs} === 'rung 2: 2 trials, 0 over'", 120)  # the third epoch waits for the file
            for status in jobs_of(sweep_cluster.address):
                assert status["reports"] == 2 and status["progress"] == pytest.approx(0.5)
                spent = sum(
                    status[f"{part}_s"] for part in ("waiting", "starting", "pausing", "catching_up", "training")
                )
                assert spent > 0 and 0 < status["productive_share"] <= 1
            hold.touch()
            until(page, "document.querySelector('[data-sweep] h3').textContent.includes('0 running')", 120)
    finally:
        hold.touch()
        sweep.join(timeout=60)
    with dashboard("--from", str(tmp_path / "runs")) as (url, _):
        stored = read(f"{url}api/snapshot")["jobs"]
    assert len(stored) == 2 and {job["phase"] for job in stored} <= {"finished", "stopped"}
    assert all(job["sweep"] for job in stored)
