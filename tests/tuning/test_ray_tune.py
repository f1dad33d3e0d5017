"""Sweeps of Ray Tune on a real cluster of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray import tune

from tests.local_cluster import LocalCluster
from tests.tuning.sweeps import fit

pytestmark = pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4})


def test_reports_become_results_in_order_and_none_is_lost(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    grid = fit(tmp_path, {"quality": tune.grid_search([1.0, 2.0]), "epochs": 5})
    assert not grid.errors
    for result in grid:
        rows = result.metrics_dataframe
        assert rows["training_iteration"].tolist() == [1, 2, 3, 4, 5]
        assert rows["epoch"].tolist() == [0, 1, 2, 3, 4]
        assert rows["score"].tolist() == [result.config["quality"] * k for k in range(1, 6)]
    assert grid.get_best_result().config["quality"] == 2.0
