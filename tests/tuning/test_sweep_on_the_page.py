"""A sweep of Ray Tune on the page, in a real browser, while it runs and from its files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ray import tune
from ray.tune.schedulers import MedianStoppingRule

from tests.local_cluster import LocalCluster
from tests.observe.page.pages import chromium, dashboard, missing, read, tab, until
from tests.tuning.sweeps import fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4}),
    pytest.mark.timeout(1000),
]


def test_the_trials_of_a_sweep_are_lines_of_it(sweep_cluster: LocalCluster, tmp_path: Path) -> None:
    hold = tmp_path / "go"
    space = {"quality": tune.grid_search([1.0, 2.0]), "epochs": 4, "hold": str(hold)}
    # It compares them at 1, 2 and 4 reports, and cuts none of so few.
    median = MedianStoppingRule(time_attr="training_iteration", grace_period=1, min_samples_required=5)
    options = {"scheduler": median, "run": {"stop": {"training_iteration": 4}}}
    sweep = threading.Thread(target=fit, args=(tmp_path / "runs", space), kwargs=options)
    sweep.start()
    try:
        with dashboard(address=sweep_cluster.address) as (url, _), chromium() as started, tab(started) as (page, _):
            page.goto(url)
            until(page, "document.querySelectorAll('[data-sweep]').length === 1", 120)
            until(page, "document.querySelectorAll('[data-sweep] svg rect').length >= 2", 120)
            assert "2 trials" in page.locator("[data-sweep] h3").inner_text()
            jobs = read(f"{url}api/snapshot")["jobs"]
            assert {job["sweep"] for job in jobs} == {"tests"} and len(jobs) == 2
            rungs = "[...document.querySelectorAll('[data-rung]')].map((each) => each.textContent).join()"
            until(page, f"{rungs} === 'rung 2: 2 trials, 0 over'", 120)  # the third epoch waits for the file
            for job in read(f"{url}api/snapshot")["jobs"]:
                assert (job["reports"], job["rungs"]) == (2, [1, 2, 4]) and 0.5 <= job["progress"] <= 0.75
                spent = read(f"{url}api/jobs/{job['job']}")["shares"]
                assert spent["training"] > 0 and 0 < job["productive"] <= 1
            until(page, "document.querySelectorAll('[data-parallel=tests] path').length === 2", 30)
            until(page, "document.querySelector('[data-importance=tests]').textContent.includes('2 have one')", 30)
            hold.touch()
            until(page, "document.querySelector('[data-sweep] h3').textContent.includes('0 running')", 120)
    finally:
        hold.touch()
        sweep.join(timeout=180)
    with dashboard("--from", str(tmp_path / "runs")) as (url, _):
        stored = read(f"{url}api/snapshot")["jobs"]
    assert len(stored) == 2 and {job["phase"] for job in stored} <= {"finished", "stopped"}
    assert {(job["sweep"], job["metric"], job["mode"]) for job in stored} == {("tests", "score", "max")}
    assert sorted((job["parameters"]["quality"], job["score"]) for job in stored) == [(1.0, 4.0), (2.0, 8.0)]
