"""Jobs whose workers own the rows of a table, and are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from tests.job import tabled
from tests.job.jobs import kinds

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000), pytest.mark.slow]


@pytest.mark.parametrize("copies", [1, 2])
def test_loss_costs_steps_only_where_rows_have_one_owner(ray_cluster: Any, tmp_path: Path, copies: int) -> None:
    handle = er.ElasticTrainer(
        tabled.train,
        train_loop_config={"copies": copies},
        scaling_config=ray.train.ScalingConfig(num_workers=(2, 3)),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "runs"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
        elastic_config=er.ElasticConfig(
            faults=Faults().kill(rank=1, step=14, moment="vote"), checkpoint_interval_s=0.1
        ),
    ).submit()
    result = handle.result(timeout=180)
    assert result.metrics is not None
    for name, wanted in tabled.by_torch().items():
        assert result.metrics[name] == pytest.approx(wanted, rel=1e-4)
    assert (EventKind.RESTART in kinds(handle)) == (copies == 1)
    reasons = [event.reason for event in handle.events() if event.kind is EventKind.RESTART]
    if copies == 1:
        assert "copies=1" in reasons[0] and "ShardedEmbedding" in reasons[0], reasons
        assert EventKind.RESUMED in kinds(handle)
