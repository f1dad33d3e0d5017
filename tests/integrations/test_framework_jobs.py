"""Lightning and transformers in jobs of real processes: resizes and a SIGKILL, as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch

import elastic_ray as er
from elastic_ray.events import EventKind
from tests.integrations.frameworks import EPOCHS, SAMPLES, used, with_lightning, with_transformers
from tests.job.jobs import kinds, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]

FRAMEWORKS = {"lightning": with_lightning, "transformers": with_transformers}


def set_pause(folder: Path, pause_s: float) -> None:
    """What each step takes besides."""
    (folder / "pause.new").write_text(str(pause_s))
    (folder / "pause.new").replace(folder / "pause")


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_sample_once_with_the_weights_of_one_process(framework: str, ray_cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    train = FRAMEWORKS[framework]
    for name in ("alone", "job"):
        (tmp_path / name).mkdir()
    train({"folder": str(tmp_path / "alone"), "plain": True})
    folder = tmp_path / "job"
    set_pause(folder, 2.0)  # new workers import for some time
    handle = er.ElasticTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3), resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path / "runs")),
    ).submit()
    for workers in (1, 3, 2):
        handle.resize(workers)
        wait_until(lambda workers=workers: handle.status().workers == workers, handle, 150)
    os.kill(handle.workers()[0].pid, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle, 120)
    set_pause(folder, 0.0)
    handle.result(timeout=250)
    epochs = used(folder)
    assert {epoch: sorted(each for step in steps.values() for each in step) for epoch, steps in epochs.items()} == {
        epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)
    }
    alone, job = (torch.load(tmp_path / name / "weights.pt") for name in ("alone", "job"))
    for name, value in alone.items():
        torch.testing.assert_close(job[name], value, rtol=1e-3, atol=5e-5)
    if framework == "transformers":
        assert len(list(folder.glob("checkpoint-*"))) == 2, "one worker saves, and keeps two"
