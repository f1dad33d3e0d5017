"""The driver's end of a job: what a handle answers while the job runs, after its end, and when it is lost."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.train

import elastic_ray as er
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.driver.handle import JobHandle
from elastic_ray.driver.other_clusters import refuse_running_elsewhere
from elastic_ray.errors import JobLostError, JobNameTakenError
from elastic_ray.events import EventKind, JobPhase
from elastic_ray.record.submitted import SubmittedJob
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]


def test_a_handle_from_submission_to_the_end(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=(1, 4), name="one", epochs=10_000)
    of_numpy: Any = np.int64(2)
    handle.resize(of_numpy)  # the controller's journal holds Python's only
    wait_until(lambda: [worker.rank for worker in handle.workers()] == [0, 1], handle)
    with pytest.raises(TimeoutError, match=r"has not ended within 0.2 s \(running, 2 worker"):
        handle.result(timeout=0.2)
    for workers, error in ((0, ValueError), (5, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="but got"):
            handle.resize(workers)
    with pytest.raises(JobNameTakenError, match=r"'one' is active.*JobHandle.attach\('one'\)"):
        start(tmp_path, workers=1, name="one")
    attached = JobHandle.attach("one")
    assert attached.status().workers == 2
    attached.stop()
    assert handle.result(timeout=180).error is None
    assert handle.done() and handle.status().phase is JobPhase.STOPPED
    assert kinds(handle)[-1] is EventKind.FINISHED
    assert handle.events(since=len(handle.events())) == ()
    assert handle.workers() == ()
    handle.resize(2)  # nobody is there any more to refuse it
    handle.release()
    handle.stop()
    for thread in threading.enumerate():
        if thread.name == "elastic_ray-lease-one":  # nothing is left to do for it
            thread.join(timeout=180)
            assert not thread.is_alive()
    with pytest.raises(ValueError, match="no job 'nobody' to attach to"):
        JobHandle.attach("nobody")


@pytest.mark.thorough
def test_lost_controller_is_named_with_the_jobs_last_state(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, name="lost", epochs=10_000)
    wait_until(lambda: handle.status().step > 3, handle)
    ray.kill(ray.get_actor("job:lost", namespace="elastic_ray"))
    with pytest.raises(JobLostError, match=r"job 'lost' was lost.*Last known state: running, 2 worker"):
        handle.result(timeout=180)
    assert handle.status().phase is JobPhase.FAILED


@pytest.mark.slow
def test_fit_shows_what_happens_and_returns_the_result(
    ray_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").mkdir()
    result = er.ElasticTrainer(
        traced.train,
        train_loop_config={"trace": str(tmp_path / "trace"), "epochs": 1},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="fits", storage_path=str(tmp_path / "runs")),
    ).fit()
    assert result.metrics["samples"] == 192
    assert result.return_value == traced.account(tmp_path / "trace").final.pop()
    assert Path(result.path).name == "fits"
    output = capsys.readouterr().out
    assert "job fits: started 0 -> 2 workers" in output or "job fits: 0 -> 2 workers" in output
    assert "job fits: finished" in output


@pytest.mark.thorough
def test_ctrl_c_stops_the_job(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    script = textwrap.dedent(
        f"""
        import ray, ray.train
        ray.init(address={ray_cluster.address!r}, log_to_driver=False)
        import elastic_ray as er
        from tests.job import traced
        er.ElasticTrainer(
            traced.train,
            train_loop_config={{"trace": {str(tmp_path / "trace")!r}, "epochs": 100_000}},
            scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={{"CPU": 1}}),
            run_config=ray.train.RunConfig(name="interrupted", storage_path={str(tmp_path / "runs")!r}),
        ).fit()
        """
    )
    driver = subprocess.Popen(
        [sys.executable, "-u", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=os.getcwd(),
    )
    assert driver.stdout is not None
    assert any("running" in line for line in driver.stdout), "it shows that it runs"
    driver.send_signal(signal.SIGINT)
    output, errors = driver.communicate(timeout=180)
    assert driver.returncode != 0 and "Traceback" not in errors, errors
    assert output.rstrip().endswith("job interrupted: run the script again to continue it")
    events = (tmp_path / "runs" / "interrupted" / "events.jsonl").read_text()
    assert "the job has stopped" in events


@pytest.mark.thorough
def test_another_cluster_finds_a_running_job_by_its_storage(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=1, name="elsewhere", epochs=10_000)
    handle.pause()
    wait_until(lambda: handle.status().phase is JobPhase.PAUSED, handle)
    storage = RunStorage(handle.storage_path)
    kept = SubmittedJob.from_json(storage.read_submission())
    wait_until(lambda: storage.read_alive() > 0.0, handle)
    other = dataclasses.replace(kept, session="another", address="10.0.0.9:6379")
    with pytest.raises(JobNameTakenError, match=f"in use by job 'elsewhere' of another cluster, at {kept.address}"):
        refuse_running_elsewhere(storage, other, timeout_s=10.0)
    handle.stop()
    handle.result(timeout=180)
    refuse_running_elsewhere(storage, other, timeout_s=10.0, watch_s=0.0)
