"""What a job costs the head: its controller, and the allocator that all jobs share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train

import elastic_ray as er
from placement.ray_cluster.named_actors import ALLOCATOR, NAMESPACE
from tests.job.jobs import wait_until
from tests.local_cluster import LocalCluster

pytestmark = [pytest.mark.ray_cluster(num_cpus=2), pytest.mark.timeout(1000)]

MOST_MB = 90.0
HEAVY = ("torch", "scipy", "pandas", "ray.train", "ray.tune", "ray.data")


def train(config: dict[str, Any]) -> None:
    """Everything that a controller hears of: steps to fit a model to, reports with tensors, checkpoints, a resize."""
    import torch

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    model: Any = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=16)
    loader.autoscale_batch_size(max_batch_size=64, local_bsz_bounds=(4, 32), gradient_accumulation=True)
    for epoch in er.remaining_epochs_until(10_000):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            time.sleep(0.02)  # a job long enough to be looked at
        folder = Path(config["folder"]) / f"of-rank-{er.get_context().get_world_rank()}"
        folder.mkdir(exist_ok=True)
        (folder / "epoch").write_text(str(epoch))
        er.report({"loss": loss.detach(), "epoch": epoch}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def private_mb(actor: Any) -> tuple[float, list[str]]:
    """The actor's private memory [MB], and what it has imported that is heavy."""

    def look(_: Any) -> tuple[float, list[str]]:
        import sys

        import psutil

        return psutil.Process().memory_full_info().uss / 1e6, [name for name in HEAVY if name in sys.modules]

    found: tuple[float, list[str]] = ray.get(actor.__ray_call__.remote(look), timeout=180)
    return found


@pytest.mark.slow
def test_a_hundred_jobs_fit_on_a_small_head(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    class Empty:  # what Ray itself needs; a class of the module's would come with all that the module imports
        pass

    empty = ray.remote(Empty).options(num_cpus=0).remote()
    job = er.ElasticTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "runs"), checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2)
        ),
        elastic_config=er.ElasticConfig(checkpoint_interval_s=1.0),
    ).submit()
    wait_until(lambda: job.status().goodput is not None and job.status().workers == 2, job)
    job.resize(1)
    wait_until(lambda: job.status().workers == 1 and job.status().metrics.get("epoch", 0) > 2, job)
    controller = ray.get_actor(f"job:{job.job}", namespace=NAMESPACE)
    allocator = ray.get_actor(ALLOCATOR, namespace=NAMESPACE)
    (floor_mb, _), (job_mb, of_job), (allocator_mb, of_allocator) = map(private_mb, (empty, controller, allocator))
    job.stop()
    job.result(timeout=180)
    figures = f"an empty actor has {floor_mb:.0f} MB, the controller {job_mb:.0f}, the allocator {allocator_mb:.0f}"
    print(figures)
    assert of_job == [] and of_allocator == []
    assert job_mb <= MOST_MB, figures
    assert allocator_mb <= MOST_MB + 20.0, figures
