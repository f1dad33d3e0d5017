"""A job on nodes of two GPU types, one of which is slower: shares follow speed and nobody is a straggler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from placement.cluster.cluster import GPU_TYPE_LABEL
from tests.job import straggling, traced
from tests.job.jobs import wait_until
from tests.job.test_stragglers import check_epochs
from tests.local_cluster import LocalCluster

SAMPLES, BATCH, SAMPLE_S = 360, 36, 0.004


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_on_two_types_take_shares_by_speed(tmp_path: Path) -> None:
    for name in ("trace", "slow"):
        (tmp_path / name).mkdir()
    config = {
        "trace": str(tmp_path / "trace"),
        "slow": str(tmp_path / "slow"),
        "samples": SAMPLES,
        "batch_size": BATCH,
        "sample_s": SAMPLE_S,
        "epochs": 100_000,
        "slow_type": "SLOW",
    }
