"""Jobs on a real cluster whose policies ask for sizes, beside others and beyond the loss of their controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.adaptation import Checkpoint, Policy, PolicyView, Report, Resize
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from tests.job import traced
from tests.job.controllers import kill_controller
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]


class Sizes(Policy):
    """Asks for one size after the other, each once it has the one before."""

    def __init__(self, *sizes: int) -> None:
        self.left = list(sizes)
        self.wanted = 0
        self.count = 0

    def after_step(self, view: PolicyView) -> Any:
        self.count += 1
        if self.wanted in (0, view.workers) and self.left:
            self.wanted = self.left.pop(0)
            return Resize(to=self.wanted)
        return None


class Counts(Policy):
    """Saves after its sixth step, and tells how many it has seen."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self, view: PolicyView) -> Any:
        self.count += 1
        return Checkpoint() if self.count == 6 else None

    def after_train(self, view: PolicyView) -> Any:
        return Report({"count": self.count, "step": view.step})


def adapted(
    folder: Path, policy: Policy, workers: Any, *, faults: Faults | None = None, report_s: float = 1.0, **config: Any
) -> er.JobHandle:
    """Submit a traced job with a policy."""
    (folder / "trace").mkdir(exist_ok=True)
    return er.ElasticTrainer(
        traced.train,
        train_loop_config={"trace": str(folder / "trace"), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "runs"), failure_config=ray.train.FailureConfig(max_failures=2)
        ),
        elastic_config=er.ElasticConfig(faults=faults, report_interval_s=report_s),
        adaptation=[policy],
    ).submit()


def sizes(handle: er.JobHandle) -> list[int]:
    """Sizes that the job was changed to."""
    return [event.to_workers for event in handle.events() if event.kind is EventKind.RESIZE]


@pytest.mark.slow
def test_job_gets_the_sizes_it_asks_for_while_training(ray_cluster: Any, tmp_path: Path) -> None:
    """Its policy is given both to the trainer and in the loop, and wishes do not wait for the next regular report."""
    again = Sizes(3, 1, 2)
    handle = adapted(tmp_path, Sizes(3, 1, 2), (1, 4), epochs=10_000, pause_s=0.02, own_policy=again, report_s=100.0)
    wait_until(lambda: len(sizes(handle)) > 0 and sizes(handle)[-1] == 2 and 3 in sizes(handle), handle, 90)
    assert "its policy asks for 2 workers" in handle.status().note
    handle.resize(3)  # the user outranks it
    wait_until(lambda: handle.status().workers == 3, handle)
    handle.stop()
    handle.result(timeout=180)
    seen = sizes(handle)
    assert [size for size in seen if size == 3 or size == 1][:2] == [3, 1], seen
    assert not {EventKind.FAILURE, EventKind.RESTART} & set(kinds(handle))
    asked = [event.detail["request"]["to"] for event in handle.events() if event.kind is EventKind.POLICY]
    assert asked == [3, 1, 2]
    traced.check_identical(traced.read(tmp_path / "trace"))


@pytest.mark.slow
def test_wish_waits_for_free_slots_beyond_a_controller_loss(ray_cluster: Any, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    other = start(tmp_path / "b", workers=2, epochs=10_000, pause_s=0.05)
    wait_until(lambda: other.status().workers == 2, other)
    handle = adapted(tmp_path / "a", Sizes(3), (1, 4), epochs=10_000, pause_s=0.05)
    wait_until(lambda: "its policy asks for 3 workers" in handle.status().note, handle, 90)
    assert handle.status().workers < 3
    kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    other.stop()
    other.result(timeout=180)
    wait_until(lambda: handle.status().workers == 3, handle, 90)
    last = start(tmp_path / "c", workers=3, epochs=10_000, pause_s=0.05)
    wait_until(lambda: last.status().workers == 3 and handle.status().workers == 1, last, 90)
    for each in (handle, last):
        each.stop()
        each.result(timeout=180)
    assert EventKind.FAILURE not in kinds(handle)


@pytest.mark.slow
def test_a_policy_goes_on_from_an_automatic_checkpoint(ray_cluster: Any, tmp_path: Path) -> None:
    """Its counter is that of the committed steps, also after all workers were lost."""
    faults = Faults().kill(rank=0, step=20, moment="backward", worker="w1")
    handle = adapted(tmp_path, Counts(), 1, faults=faults, epochs=5)
    handle.result(timeout=180)
    assert EventKind.RESTART in kinds(handle) or EventKind.RESUMED in kinds(handle), kinds(handle)
    told = [event.detail["request"] for event in handle.events() if event.kind is EventKind.POLICY]
    reports = [each["metrics"] for each in told if each["kind"] == "Report"]
    assert reports == [{"count": 40, "step": 40}], told
    assert [each["kind"] for each in told].count("Checkpoint") <= 2
