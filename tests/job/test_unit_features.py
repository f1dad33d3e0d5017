"""Policies and shares in jobs of units: with each, parameters through changes are those of whole workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import elastic_ray as er
from elastic_ray.events import EventKind
from tests.job.jobs import kinds, wait_until
from tests.job.unit_jobs import check_close, parameters, submit

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000), pytest.mark.slow]


def through_changes(folder: Path, kind: str, unit: Any, **config: Any) -> er.JobHandle:
    """A job of two, three and again two units, of which one is killed."""
    until = folder / "done"
    handle = submit(folder / "units", kind, (2, 6), unit, epochs=40, until=str(until), **config)
    for size in (2, 3, 2):
        handle.resize(size)
        wait_until(lambda size=size: handle.status().workers == size, handle)
    os.kill(handle.workers()[-1].pid, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle)
    until.touch()
    return handle


@pytest.mark.parametrize(("kind", "unit"), [("tp", 2), ("shard", er.Unit(shard=2))])
@pytest.mark.parametrize("feature", ["policies", "share"])
def test_feature_survives_changes(ray_cluster: Any, tmp_path: Path, feature: str, kind: str, unit: Any) -> None:
    shared = {"slow": (1,), "elastic": {"stragglers": "share"}}
    config: dict[str, Any] = {"policies": True, "largest": 24} if feature == "policies" else shared
    whole = submit(tmp_path / "whole", "plain", 2, 1, epochs=40, **{**config, "slow": ()})
    wanted = parameters(whole)
    handle = through_changes(tmp_path, kind, unit, **config)
    check_close(parameters(handle), wanted)
    assert EventKind.RESIZE in kinds(handle) and EventKind.RESTART not in kinds(handle)
    if feature == "policies":
        requests = [event.reason for event in handle.events() if event.kind is EventKind.POLICY]
        assert len(requests) == 4 and all("refused" not in reason for reason in requests), requests
        norms = [dict(each.result(timeout=180).metrics or {})["norms"] for each in (whole, handle)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    else:
        told = [event.reason for event in handle.events() if event.kind is EventKind.STRAGGLER]
        assert any("of another's samples" in reason for reason in told), told
