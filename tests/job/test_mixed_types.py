"""A job on nodes of two GPU types, one of which is slower: shares follow speed and no worker is a straggler."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from placement.allocator.actor import get_or_create_allocator
from placement.cluster.cluster import GPU_TYPE_LABEL
from tests.job import straggling, traced
from tests.job.jobs import wait_until
from tests.job.straggling_epochs import SAMPLES, check_epochs
from tests.local_cluster import LocalCluster

# The head has none of the workers' resource.
pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000), pytest.mark.slow]

BATCH, SAMPLE_S, TIMES = 36, 0.004, 3.0


def start(folder: Path, batch_size: int = BATCH) -> er.JobHandle:
    """A job of two workers, one on each type."""
    for name in ("trace", "slow"):
        (folder / name).mkdir()
    config: dict[str, Any] = {
        "trace": str(folder / "trace"),
        "slow": str(folder / "slow"),
        "samples": SAMPLES,
        "batch_size": batch_size,
        "sample_s": SAMPLE_S,
        "epochs": 100_000,
        "by_type": {"SLOW": TIMES},
    }
    get_or_create_allocator("fifo")  # which does not look at types
    return er.ElasticTrainer(
        straggling.train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"slot": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
        scheduling_config=er.SchedulingConfig(mixed_gpu_types=True),
    ).submit()


def test_shares_follow_the_types_speeds(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    for gpu in ("FAST", "SLOW"):
        ray_cluster.add_node(num_cpus=1, resources={"slot": 1}, labels={GPU_TYPE_LABEL: gpu})
    handle = start(tmp_path)

    def shares() -> list[tuple[int, int]]:
        """Samples of the larger and the smaller share, by step."""
        lines = [line for line in traced.read(tmp_path / "trace") if line["kind"] == "step"]
        by_step: dict[int, list[int]] = {}
        for line in lines:
            by_step.setdefault(line["step"], []).append(len(line["indices"]))
        pairs = [sizes for _, sizes in sorted(by_step.items()) if len(sizes) == 2 and sum(sizes) == BATCH]
        return [(max(sizes), min(sizes)) for sizes in pairs]

    wait_until(lambda: len(shares()) > 60 and shares()[-1][0] > 2 * shares()[-1][1], handle)
    first = handle.status().step
    wait_until(lambda: handle.status().step > first + 100, handle)
    found, status = shares()[-50:], handle.status()
    events = handle.events()
    handle.stop()
    large, small = (statistics.median(sizes) for sizes in zip(*found, strict=True))
    assert large / small == pytest.approx(TIMES, rel=0.25)
    # Either worker alone: 1 / SAMPLE_S samples/s, and a third of that.
    assert status.throughput >= 0.8 * (1.0 + 1.0 / TIMES) / SAMPLE_S
    check_epochs(tmp_path)
    assert [e for e in events if e.kind is EventKind.STRAGGLER] == []


def test_batch_that_is_too_small_for_shares_ends_job(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    for gpu in ("FAST", "SLOW"):
        ray_cluster.add_node(num_cpus=1, resources={"slot": 1}, labels={GPU_TYPE_LABEL: gpu})
    handle = start(tmp_path, batch_size=6)
    with pytest.raises(ray.train.TrainingFailedError, match="mixed_gpu_types=True needs a batch of 8 samples or more"):
        handle.result(timeout=180)
