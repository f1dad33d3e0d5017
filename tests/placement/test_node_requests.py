"""What Ray's autoscaler hears of us, on a real cluster: directly, and through the coordinator beside other users."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from placement.ray_cluster.cluster_scaler import NodeRequests

pytestmark = [pytest.mark.slow, pytest.mark.ray_cluster(num_cpus=2)]

SPOT = ({"CPU": 1.0, "slot": 2.0}, {"ray.io/market-type": "spot"})


def constraints() -> list[dict[str, float]]:
    """The bundles that Ray's autoscaler is to hold room for (v1, which these clusters have, reads them here)."""
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.experimental.internal_kv import _internal_kv_get

    found: list[dict[str, float]] = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"[]")
    return found


def become(what: Callable[[], Any], wanted: Any) -> None:
    deadline = time.monotonic() + 60
    while (found := what()) != wanted:
        assert time.monotonic() < deadline, f"{found} is not {wanted}"
        time.sleep(0.2)


def test_alone_the_list_is_ours_and_outlived_ones_replaced(ray_cluster: Any) -> None:
    requests = NodeRequests()
    requests.ask([SPOT, SPOT])
    become(constraints, [SPOT[0], SPOT[0]])
    NodeRequests().ask([])  # of an allocator made anew, which has no use for nodes
    become(constraints, [])
    requests.ask([SPOT])
    become(constraints, [SPOT[0]])
    requests.withdraw()
    become(constraints, [])


def test_beside_elastic_run_of_ray_train_neither_undoes_other(ray_cluster: Any, tmp_path: Path) -> None:
    requests = NodeRequests()
    end = tmp_path / "end"
    run = ray.remote(num_cpus=0)(_ray_train).remote(str(tmp_path), str(end))
    become(lambda: {"CPU": 1.0} in constraints(), True)
    requests.ask([SPOT])
    become(lambda: SPOT[0] in constraints() and {"CPU": 1.0} in constraints(), True)
    requests.withdraw()
    become(lambda: SPOT[0] not in constraints() and {"CPU": 1.0} in constraints(), True)
    requests.ask([SPOT])
    end.touch()
    ray.get(run, timeout=180)
    become(constraints, [SPOT[0]])
    requests.withdraw()


def _ray_train(folder: str, end: str) -> None:
    """Trains nothing, on as many workers as there are, until a file is there."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    def wait() -> None:
        deadline = time.monotonic() + 90
        while not Path(end).exists() and time.monotonic() < deadline:
            time.sleep(0.1)

    scaling = ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1})
    DataParallelTrainer(wait, scaling_config=scaling, run_config=RunConfig(storage_path=folder)).fit()


def test_beside_ray_data_neither_undoes_the_other(ray_cluster: Any) -> None:
    """``data`` is Ray Data's own client of the coordinator."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        DefaultAutoscalingCoordinator,
        get_or_create_autoscaling_coordinator,
    )

    requests = NodeRequests()
    requests.ask([SPOT])
    become(constraints, [SPOT[0]])
    coordinator: Any = get_or_create_autoscaling_coordinator()
    data = DefaultAutoscalingCoordinator("data")
    data.request_resources([{"CPU": 2.0}], expire_after_s=60)
    requests.ask([SPOT])  # as the allocator does again and again: it finds the coordinator now
    become(lambda: sorted(constraints(), key=len), [{"CPU": 2.0}, SPOT[0]])
    data.cancel_request()
    become(constraints, [SPOT[0]])
    data.request_resources([{"CPU": 1.0}], expire_after_s=60)
    requests.withdraw()
    become(constraints, [{"CPU": 1.0}])
    ray.kill(coordinator)
