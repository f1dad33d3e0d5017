"""Parts of GPUs, label operators and a job's place among others, with real jobs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

import elastic_ray as er
from placement import MemoryNeed
from placement.allocator.actor import get_or_create_allocator
from tests.job.jobs import start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8, num_gpus=0, labels={"zone": "a"}), pytest.mark.timeout(1000)]


def nodes(handle: er.JobHandle) -> list[str]:
    return sorted(worker.node for worker in handle.workers())


@pytest.mark.slow
def test_half_and_whole_gpus_share_the_labelled_node(ray_cluster: Any, tmp_path: Path) -> None:
    """The GPUs are logical ones: the workers train on the CPU."""
    ray_cluster.add_node(num_cpus=4, num_gpus=2, labels={"zone": "c"})
    node = ray_cluster.add_node(num_cpus=4, num_gpus=2, labels={"zone": "b"}).node_id
    accepted = {"zone": "in(a,b)"}
    for name in ("half", "whole"):
        (tmp_path / name).mkdir()
    whole = start(
        tmp_path / "whole",
        workers=1,
        bundle={"CPU": 1, "GPU": 1},
        labels=accepted,
        name="whole",
        pause_s=0.2,
        epochs=99,
    )
    half = start(
        tmp_path / "half",
        workers=2,
        bundle={"CPU": 1, "GPU": 0.5},
        labels={"zone": "!c"},
        name="half",
        pause_s=0.2,
        epochs=99,
    )
    wait_until(lambda: len(nodes(whole)) == 1 and len(nodes(half)) == 2, half)
    assert nodes(whole) + nodes(half) == [node] * 3
    for handle in (whole, half):
        handle.stop()
        assert handle.wait(60)


@pytest.mark.slow
def test_a_job_has_allowed_sizes_only(ray_cluster: Any, tmp_path: Path) -> None:
    ray_cluster.add_node(num_cpus=3, labels={"zone": "sized"})
    handle = start(
        tmp_path,
        workers=(1, 4),
        labels={"zone": "sized"},
        scheduling=er.SchedulingConfig(sizes=(2, 4)),
        pause_s=0.02,
        epochs=999,
        name="sized",
    )
    wait_until(lambda: handle.status().workers == 2, handle)
    with pytest.raises(ValueError, match=r"but got 3; SchedulingConfig\(sizes=\(2, 4\)\) allows others only"):
        handle.resize(3)
    ray_cluster.add_node(num_cpus=1, labels={"zone": "sized"})
    wait_until(lambda: handle.status().workers == 4, handle)
    handle.stop()
    assert handle.wait(60)
    assert {event.to_workers for event in handle.events() if event.kind in ("started", "resize")} == {2, 4}


@pytest.mark.slow
def test_job_that_fits_from_four_workers_starts_on_four(ray_cluster: Any, tmp_path: Path) -> None:
    ray_cluster.add_node(num_cpus=4, labels={"zone": "divided"})
    for name in ("other", "divided"):
        (tmp_path / name).mkdir()
    other = start(tmp_path / "other", workers=1, labels={"zone": "divided"}, name="other", pause_s=0.2, epochs=999)
    wait_until(lambda: other.status().workers == 1, other)
    need = MemoryNeed(available_bytes=5 << 30, sharded_bytes=10 << 30)
    config = er.SchedulingConfig(memory=need)
    job = {"labels": {"zone": "divided"}, "name": "divided", "pause_s": 0.02, "epochs": 999}
    handle = start(tmp_path / "divided", workers=(1, 4), scheduling=config, **job)
    wait_until(lambda: "4 slots" in handle.status().waits_for, handle)
    assert handle.status().workers == 0, "three slots are free"
    with pytest.raises(ValueError, match=r"4 to 4 workers, but got 2; .*SchedulingConfig\(memory=<from 4 on>\)"):
        handle.resize(2)
    other.stop()
    wait_until(lambda: handle.status().workers == 4, handle)
    state = ray.get(get_or_create_allocator().snapshot.remote(), timeout=180)
    assert state.jobs["divided"].view.sizes.memory == need
    os.kill(handle.workers()[1].pid, signal.SIGKILL)
    wait_until(lambda: [e.to_workers for e in handle.events() if e.kind == "failure"] == [3], handle)
    (told,) = [e for e in handle.events() if e.kind == "warning"]
    assert (told.from_workers, told.to_workers) == (4, 3) and "fewer than the 4 that the job's memory" in told.reason
    wait_until(lambda: handle.status().workers == 4, handle)
    handle.stop()
    assert handle.wait(60)
    assert [e.to_workers for e in handle.events() if e.kind in ("started", "resize")] == [4, 4]


@pytest.mark.slow
def test_what_user_asks_for_reaches_allocator_and_is_kept(ray_cluster: Any, tmp_path: Path) -> None:
    for name in ("low", "high"):
        (tmp_path / name).mkdir()
    low = start(tmp_path / "low", workers=(1, 8), name="low", pause_s=0.2, epochs=60)
    wait_until(lambda: len(nodes(low)) >= 2, low)
    ask = er.SchedulingConfig(priority=3, preemptible=False, deadline_s=3600, whole_nodes=True)
    high = start(tmp_path / "high", workers=1, bundle={"CPU": 7}, name="high", pause_s=0.2, epochs=4, scheduling=ask)
    wait_until(lambda: len(nodes(high)) == 1, high)
    state = ray.get(get_or_create_allocator().snapshot.remote(), timeout=180)
    seen = state.jobs["high"].view
    assert (seen.priority, seen.tenant, seen.preemptible, seen.whole_nodes) == (3, "", False, True)
    assert seen.deadline_s == pytest.approx(seen.submitted_s + 3600)
    assert "deadline: not known yet how long the job takes" in state.jobs["high"].reason.words
    assert sum(state.jobs["low"].target.values()) == 1
    assert "jobs of higher priority go first" in state.jobs["low"].reason.words
    high.result(timeout=180)
    low.stop()
    assert low.wait(30)
