"""Workers killed, hung and lost at scripted moments: training continues from memory, exactly, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch

import elastic_ray as er
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from tests.job import traced
from tests.job.jobs import kinds, run, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=16), pytest.mark.timeout(1000)]


@pytest.mark.thorough
def test_kill_at_every_moment_of_a_step(ray_cluster: Any, tmp_path: Path) -> None:
    """One worker after the other dies, each at another moment; every epoch stays exact."""
    faults = (
        Faults()
        .kill(rank=1, step=3, moment="forward")
        .kill(rank=2, step=6, moment="backward")
        .kill(rank=1, step=9, moment="allreduce")
        .kill(rank=1, step=12, moment="optimizer_step")
        .kill(rank=0, step=15, moment="after_step")
    )
    handle, account = run(tmp_path, workers=6, faults=faults, epochs=6)
    failures = [event for event in handle.events() if event.kind is EventKind.FAILURE]
    assert len(failures) == 5, kinds(handle)
    assert {event.from_workers - event.to_workers for event in failures} == {1}
    assert len(account.epochs) == 6 and len(account.final) == 1
    assert account.progress == {(48.0, (8.0, 16.0, 24.0, 32.0, 40.0, 48.0))}  # no lost step counts
    assert all(event.pause_s < 5 for event in failures), [event.pause_s for event in failures]


@pytest.mark.slow
def test_rank_zero_and_its_neighbour_die_at_once(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults().kill(rank=0, step=5, moment="allreduce").kill(rank=1, step=5, moment="backward")
    handle, account = run(tmp_path, workers=4, faults=faults)
    assert EventKind.FAILURE in kinds(handle)
    assert len(account.final) == 1
    assert handle.result().metrics["samples"] == 192


@pytest.mark.slow
def test_hung_worker_is_found_and_replaced(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults().hang(rank=1, step=6, moment="allreduce")
    handle = start(tmp_path, workers=3, faults=faults, epochs=10_000, pause_s=0.03)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle)
    wait_until(lambda: handle.status().workers == 3, handle)
    handle.stop()
    handle.result(timeout=180)
    failure = next(event for event in handle.events() if event.kind is EventKind.FAILURE)
    assert "its process is stopped" in failure.reason
    assert failure.pause_s < 4
    traced.check_identical(traced.read(tmp_path / "trace"))


@pytest.mark.slow
def test_worker_busy_for_long_without_signs_is_waited_for(ray_cluster: Any, tmp_path: Path) -> None:
    """C code that holds Python's lock silences the heartbeats for twice the timeout; its node sees that it lives."""
    handle = start(tmp_path, workers=2, epochs=10_000, hold_lock_at=6, hold_lock_s=4.5)
    wait_until(lambda: handle.status().step > 12, handle)
    handle.stop()
    handle.result(timeout=180)
    assert EventKind.FAILURE not in kinds(handle)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["joining", "receiving"])
def test_joiner_dies(ray_cluster: Any, tmp_path: Path, moment: str) -> None:
    """A joiner that dies before it was agreed on, or right after, costs no step; the next one makes it."""
    faults = Faults().kill(worker="w2", moment=moment)
    handle = start(tmp_path, workers=(1, 2), faults=faults, epochs=10_000, pause_s=0.03)
    handle.resize(1)
    wait_until(lambda: handle.status().workers == 1, handle)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle)
    handle.stop()
    handle.result(timeout=180)
    seen = kinds(handle)
    assert EventKind.RESIZE in seen
    if moment == "joining":
        assert EventKind.FAILURE not in seen, "training must not notice a joiner that was never agreed on"


@pytest.mark.slow
def test_leaver_dies_while_leaving(ray_cluster: Any, tmp_path: Path) -> None:
    faults = Faults().kill(moment="leaving")
    handle = start(tmp_path, workers=(1, 3), faults=faults, epochs=10_000, pause_s=0.03)
    handle.resize(3)
    wait_until(lambda: handle.status().workers == 3, handle)
    handle.resize(1)
    wait_until(lambda: handle.status().workers == 1, handle)
    handle.stop()
    handle.result(timeout=180)
    traced.check_identical(traced.read(tmp_path / "trace"))
    assert EventKind.FAILURE not in kinds(handle), "a leaver's death must not pause the others"


def reports_each_step(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = er.AdaptiveDataParallel(net, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(60, 1)), batch_size=12)
    for _ in er.remaining_epochs_until(4):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            er.report({"step": er.get_context().get_global_step()})


@pytest.mark.slow
def test_each_step_has_one_report_whoever_dies(ray_cluster: Any, tmp_path: Path) -> None:
    faults = (
        Faults()
        .kill(rank=0, step=3, moment="allreduce")
        .kill(rank=0, step=7, moment="after_step")
        .kill(rank=1, step=11, moment="backward")
        .kill(rank=0, step=15, moment="optimizer_step")
    )
    result = er.ElasticTrainer(
        reports_each_step,
        scaling_config=ray.train.ScalingConfig(num_workers=5),
        elastic_config=er.ElasticConfig(faults=faults),
        run_config=ray.train.RunConfig(name="reports", storage_path=str(tmp_path)),
    ).fit()
    assert result.metrics_dataframe["step"].tolist() == list(range(20))
