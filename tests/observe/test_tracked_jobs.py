"""One run stays one run in its trackers, whoever is rank 0 and whichever process its controller."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import elastic_ray as er
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from tests.job.controllers import kill_controller
from tests.job.jobs import kinds, run, start, wait_until
from tests.observe.tb_files import Points, scalars, texts

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


def board(folder: Path, handle: er.JobHandle) -> Path:
    """Where the job's TensorBoard files are."""
    return folder / "runs" / handle.job / "tensorboard"


def there(shown: dict[str, Points]) -> list[float]:
    """Numbers of the reports that are shown."""
    return [value for _, value in shown["elastic/report"]]


def check_reports(shown: dict[str, Points], stored: Path, reports: int) -> None:
    """Every report that the run has stored is there once, in order, and the run never goes back.

    One that a worker made in the moment in which controller and rank 0 died may be lost to both, or be known to the
    tracker alone.
    """
    known = list(RunStorage(str(stored)).read_reports(1, reports))
    assert len(known) >= reports - 2
    numbers = there(shown)
    assert numbers == sorted(set(numbers)) and set(known) <= set(numbers)
    for tag, points in shown.items():
        steps = [step for step, _ in points]
        assert steps == sorted(steps), tag


@pytest.mark.slow
def test_job_losing_rank_0_and_controller_is_one_run(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=(1, 3), epochs=60)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2 and handle.status().step > 10, handle)
    handle.resize(3)
    wait_until(lambda: handle.status().workers == 3, handle)
    os.kill(handle.workers()[0].pid, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle)
    kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    result = handle.result(timeout=180)
    assert result.error is None
    shown, marks = scalars(board(tmp_path, handle)), texts(board(tmp_path, handle))
    check_reports(shown, board(tmp_path, handle).parent, 60)
    losses = dict(zip(there(shown), (value for _, value in shown["loss"]), strict=True))
    for report in RunStorage(str(tmp_path / "runs" / handle.job)).read_reports(1, 60).values():
        assert losses[report.index] == pytest.approx(report.metrics["loss"], rel=1e-5)
    assert {"elastic/workers", "elastic/batch_size", "elastic/throughput", "elastic/pause_s"} <= shown.keys()
    assert {2.0, 3.0} <= {value for _, value in shown["elastic/workers"]}
    assert {"elastic/resize", "elastic/failure", "elastic/recovered", "elastic/finished"} <= marks.keys()
    failure = next(event for event in handle.events() if event.kind is EventKind.FAILURE)
    assert failure.reason in marks["elastic/failure"][0][1]


@pytest.mark.slow
def test_what_a_restart_repeats_replaces_what_was_there(ray_cluster: Any, tmp_path: Path) -> None:
    """The only worker dies; the reports since the last checkpoint, at step 12, are made once more."""
    elastic = {"automatic_checkpoints": False}
    faults = Faults().kill(rank=0, step=30, moment="forward")
    handle, _ = run(
        tmp_path, workers=1, epochs=6, faults=faults, elastic=elastic, max_failures=1, checkpoint_at=12, pause_s=0.1
    )
    assert EventKind.RESTART in kinds(handle)
    shown, marks = scalars(board(tmp_path, handle)), texts(board(tmp_path, handle))
    check_reports(shown, board(tmp_path, handle).parent, 7)
    assert marks["elastic/restart"][0][0] == 24, "the last checkpoint"
    assert shown["elastic/failures"][-1][1] == 1
