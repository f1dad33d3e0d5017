"""Jobs that lose everything and continue from what they have saved by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import elastic_ray as er
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.manifest import part_name
from elastic_ray.errors import TrainFunctionError
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from tests.job import traced
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]

OFTEN = {"checkpoint_interval_s": 0.05}


def resumed_at(handle: er.JobHandle) -> int:
    (event,) = [event for event in handle.events() if event.kind is EventKind.RESUMED]
    return int(event.reason.split(" at step ")[1].split(";")[0])


@pytest.mark.slow
def test_all_members_lost_in_the_middle_of_an_epoch(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults().kill(rank=0, step=11, moment="forward").kill(rank=1, step=11, moment="forward")
    handle = start(tmp_path, workers=2, faults=faults, max_failures=1, elastic=OFTEN, pause_s=0.05)
    result = handle.result(timeout=180)
    assert EventKind.RESTART in kinds(handle)
    starts = [event.to_workers for event in handle.events() if event.kind is EventKind.STARTED]
    assert starts == [2, 2], "the minimum holds also for a group whose members have loaded what was saved"
    assert 2 <= resumed_at(handle) <= 11
    assert result.metrics is not None and result.metrics["samples"] == 192, "also those of before the loss"
    traced.account(tmp_path / "trace")
    (state,) = state_files(RunStorage(str(tmp_path / "runs" / handle.job)))
    assert state.steps == 32, "what the job has ended with is kept, and nothing else"
    assert result.checkpoint is not None and result.checkpoint.path == str(Path(state.path).parent)
    assert set(er.load_model_state(result.checkpoint)) >= {"0.weight", "1.running_mean"}


@pytest.mark.slow
def test_job_continues_at_another_size_from_the_last_good(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, name="again", elastic=OFTEN, pause_s=0.05)
    storage = RunStorage(str(tmp_path / "runs" / "again"))
    wait_until(lambda: handle.status().step >= 10 and len(state_files(storage)) > 1, handle)
    handle.stop()
    handle.wait(30)
    newest, older = state_files(storage)[:2]
    part = Path(newest.path) / part_name(0)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)

    with pytest.raises(TrainFunctionError, match="another model"):
        start(tmp_path, workers=1, name="again", width=17).result(timeout=180)

    (second := tmp_path / "second").mkdir()
    handle = start(tmp_path, workers=1, name="again", trace=str(second))
    result = handle.result(timeout=180)
    assert resumed_at(handle) == older.steps
    assert "checksum" in next(event.reason for event in handle.events() if event.kind is EventKind.RESUMED)
    assert result.metrics is not None and result.metrics["samples"] == 192 and result.metrics["epoch"] == 3
    before, after = (
        [line for line in traced.read(folder) if line["kind"] == "step"] for folder in (tmp_path / "trace", second)
    )
    counted = [line for line in before if line["step"] < older.steps] + after
    assert {line["step"] for line in after} == set(range(older.steps, 32))
    drawn = sorted((line["epoch"], index) for line in counted for index in line["indices"])
    assert drawn == [(epoch, index) for epoch in range(4) for index in range(192)]
