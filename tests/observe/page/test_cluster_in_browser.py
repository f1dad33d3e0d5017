"""The page of a real cluster in a real browser: a job that grows, loses a worker, is held, released and stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ray.faults import Faults
from placement.allocator.actor import get_or_create_allocator
from placement.allocator.config import AllocatorConfig
from tests.job.jobs import start
from tests.observe.page.pages import chromium, dashboard, missing, read, tab, until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]


def wait_for(condition: Any, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_job_is_seen_growing_losing_held_and_stopped(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(
        tmp_path,
        workers=(1, 3),
        name="seen",
        epochs=100_000,
        max_failures=3,
        faults=Faults().kill(rank=0, step=150, moment="allreduce"),
    )
    with dashboard(address=ray_cluster.address) as (url, token), chromium() as started, tab(started) as (page, wrong):
        page.goto(url)
        row = page.locator("[data-job=seen]")
        row.wait_for(timeout=60_000)
        assert "live" in page.locator("#state").inner_text() and page.locator("#strip").inner_text()
        row.click()
        until(page, "document.getElementById('detail').textContent.includes('failure')", 120)
        until(page, "document.querySelector('[data-job=seen]').textContent.includes('running')")

        page.locator("#actions input").fill("2")
        page.get_by_role("button", name="Hold at this size").click()
        until(page, "document.getElementById('said').textContent.includes('token is missing')")
        assert read(f"{url}api/snapshot")["jobs"][0]["held_at"] is None
        wrong.clear()  # the browser's own line about the answer 401
        page.click("#token")
        page.fill("#ask-token", token)
        page.keyboard.press("Enter")
        page.locator("#actions input").fill("2")
        page.get_by_role("button", name="Hold at this size").click()
        until(page, "document.getElementById('said').textContent.includes('held at 2 workers')")
        workers = "document.querySelector('[data-job=seen] [data-column=workers]').textContent"
        until(page, f"{workers} === '2 (1:3) held'")
        heard = "[...document.querySelectorAll('#detail td')].filter((cell) => cell.textContent.endsWith('s ago'))"
        until(page, f"{heard}.length === 2")
        for what in ("logs", "stack"):  # one beside the other
            page.get_by_role("button", name=what).first.click()
        texts = "['logs', 'stack'].map((what) => document.getElementById(`printed-${what}`)?.textContent ?? '')"
        until(page, f"{texts}.every((text) => text.includes('of rank 0\\n'))")
        assert "1 held" in page.locator("[data-fact=jobs]").inner_text()

        found = read(f"{url}api/snapshot")
        assert {mark[3] for mark in found["marks"] if mark[2] == "seen"} >= {"kill", "resize"}
        (bar,) = [bar for bar in found["bars"] if bar[2] == "seen" and bar[4] is None]
        assert bar[5] == 2 and {node["node"] for node in found["nodes"]} == {ray_cluster.head_id}
        assert any(each["job"] == "seen" and each["reason"] for each in found["decisions"])

        page.fill("#what-nodes", "cpu:1x2")
        page.get_by_role("button", name="Ask the simulator").click()
        page.wait_for_selector("#what-answer td:has-text('seen')")
        page.get_by_role("button", name="Release").click()
        until(page, f"!{workers}.includes('held')")
        phase = "document.querySelector('[data-job=seen] [data-column=phase]').textContent"
        page.get_by_role("button", name="Pause", exact=True).click()
        until(page, f"{phase} === 'paused'")
        assert read(f"{url}api/snapshot")["strip"]["waiting"] == 0
        page.get_by_role("button", name="Resume", exact=True).click()
        until(page, f"{phase} === 'running'")
        page.get_by_role("button", name="Stop", exact=True).click()
        until(
            page,
            "/stopped|ended/.test(document.querySelector('[data-job=seen] [data-column=phase]').textContent)",
        )
        assert wrong == ["dialog: Stop job seen?"]
        wrong.clear()
    handle.result(timeout=180)
    with dashboard("--from", str(tmp_path / "runs")) as (url, token):  # the same page, from its files
        (job,) = read(f"{url}api/snapshot")["jobs"]
        assert (job["job"], job["phase"], token) == ("seen", "stopped", "")
        kinds = [event[1] for event in read(f"{url}api/jobs/seen")["events"]]
        assert kinds[0] == "started" and "failure" in kinds and kinds[-1] == "finished"


@pytest.mark.thorough
def test_the_allocator_serves_the_page_until_it_ends(ray_cluster: Any) -> None:
    allocator: Any = get_or_create_allocator(config=AllocatorConfig(dashboard=True))
    wait_for(lambda: ray.get(allocator.dashboard.remote()))
    address = ray.get(allocator.dashboard.remote())
    found = read(f"{address}api/snapshot")
    assert address.startswith("http://127.0.0.1:") and found["strip"]["policy"] == "goodput"
    assert found["source"]["actions"] is False and [each["node"] for each in found["nodes"]] == [ray_cluster.head_id]
    ray.kill(allocator)

    def gone() -> bool:
        try:
            read(f"{address}api/snapshot")
        except OSError:
            return True
        return False

    wait_for(gone)
