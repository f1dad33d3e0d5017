"""A job on two nodes trains through what a fleet meets in its first month, and tells each cause."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ray.events import EventKind, JobPhase
from placement.allocator.actor import find_allocator
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until
from tests.placement.views import view

pytestmark = [pytest.mark.slow, pytest.mark.ray_cluster(num_cpus=2), pytest.mark.timeout(900)]

SUBMISSIONS = 400
CLOCK = """
import os, time
_real = time.time
def _now():
    try:
        return _real() + float(open(os.environ["CLOCK_STEP"]).read())
    except (OSError, ValueError):
        return _real()
time.time = _now
"""


@pytest.fixture(scope="module", autouse=True)
def clock_step(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file whose number [s] is added to the clock of all processes of the module's cluster."""
    folder = tmp_path_factory.mktemp("clock")
    (folder / "sitecustomize.py").write_text(CLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("CLOCK_STEP", str(folder / "step"))
        yield folder / "step"


@ray.remote(num_cpus=0)
class Submitter:
    """Stands for the controllers of many jobs, which the allocator calls back."""

    def allocate(self, nodes: Any, reason: str, draining: Any, nodes_may_come: bool) -> None:
        """Nothing is started."""

    def told(self) -> None:
        """Something is told to one of them."""


def submit_many(handle: Any) -> None:
    """Have as many jobs as a sweep ask for workers at once, of a kind that no node can run; then they are gone."""
    allocator, submitter = find_allocator(), Submitter.remote()  # type: ignore[attr-defined]
    views = [view(f"sweep-{n}", max_workers=1, bundle={"CPU": 64.0}) for n in range(SUBMISSIONS)]
    answers = [allocator.heartbeat.remote(each, submitter) for each in views]
    ray.get(answers, timeout=120.0)
    ray.kill(submitter)


def test_job_trains_through_joiner_disk_node_and_clock_faults(
    clock_step: Path, ray_cluster: Any, tmp_path: Path
) -> None:
    bad, orders = tmp_path / "bad-node", tmp_path / "orders"
    bad.write_text("none yet")
    orders.mkdir()
    ray_cluster.add_node(num_cpus=2)
    handle = start(
        tmp_path,
        workers=(1, 4),
        epochs=10_000,
        pause_s=0.05,
        bad_node=str(bad),
        orders=str(orders),
        elastic={"restart": True},
    )
    handle.resize(4)
    reasons: list[str] = []

    def told(text: str) -> bool:
        reasons[:] = [f"{event.kind.value}: {event.reason}" for event in handle.events()]
        return any(text in reason for reason in reasons)

    wait_until(lambda: handle.status().workers == 4, handle)
    four = handle.status().step
    wait_until(lambda: handle.status().step >= four + 50, handle)
    # A member's disk fails, once, and the worker that is to replace it cannot read its data: its node is avoided.
    (orders / "data").touch()
    (orders / "disk").touch()
    wait_until(lambda: told("/data/shard-17") and told("/data/shard-4"), handle)
    for each in ray.nodes():
        ray.get(find_allocator().forgive.remote(each["NodeID"]), timeout=30.0)
    wait_until(lambda: handle.status().workers == 4, handle)
    # Four hundred jobs come at once, and nobody loses a slot by it.
    submit_many(handle)
    before = handle.status().step
    wait_until(lambda: handle.status().step >= before + 100, handle)
    # The clocks of all nodes are set back by an hour.
    clock_step.write_text("-3600")
    # A node of the cluster is replaced by one on which every start fails.
    (node,) = ray_cluster.added
    fresh = ray_cluster.add_node(num_cpus=2)
    bad.write_text(fresh.node_id)
    ray_cluster.remove_node(node)
    wait_until(lambda: told("libcudart"), handle)
    assert handle.status().phase is JobPhase.RUNNING
    after = handle.status().step
    wait_until(lambda: handle.status().step >= after + 100, handle)
    assert handle.status().workers in (2, 3, 4)
    (orders / "enough").touch()
    handle.result(timeout=180)
    account = traced.account(tmp_path / "trace")
    assert len(account.final) == 1 and EventKind.RESTART not in kinds(handle), "\n".join(reasons)
    assert max(account.worlds) == 4
