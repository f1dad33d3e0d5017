"""Worker processes get SIGKILL, in a step or in a regroup: each strategy keeps its promise to those that are left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind, JobEvent
from elastic_ray.faults import Faults
from elastic_ray.sync import SMA, LocalSGD, PairAveraging, Parallax, PowerSGD
from elastic_ray.sync.builders import PS
from tests.sync.killed import STEPS, Account, account, by_torch, train

pytestmark = [pytest.mark.ray_cluster(num_cpus=16), pytest.mark.timeout(1000)]

EXACT: dict[str, Any] = {"ps": PS(), "parallax": Parallax()}
COMPRESSED: dict[str, Any] = {"powersgd": PowerSGD(rank=1)}
AVERAGED: dict[str, Any] = {"local_sgd": LocalSGD(period=3), "pair": PairAveraging(period=3), "sma": SMA(alpha=0.3)}


def scripts(averaged: bool) -> dict[str, tuple[int, Faults]]:
    """Workers at the beginning, and who dies when; rank 0 owns all tensors of ``PS``."""
    last = {"moment": "average", "step": 15} if averaged else {"moment": "after_step", "step": 14}
    agreeing = "backward" if averaged else "allreduce"  # steps of a round meet nobody
    return {
        "before a step is agreed on": (
            5,
            Faults()
            .kill(rank=1, step=4, moment="forward")
            .kill(rank=2, step=9, moment="backward")
            .kill(rank=0, step=14, moment=agreeing),
        ),
        "after it": (
            5,
            Faults()
            .kill(rank=1, step=4, moment="optimizer_step")
            .kill(rank=0, step=9, moment="edge")
            .kill(rank=1, **last),
        ),
        "in a regroup": (
            6,
            Faults()
            .kill(rank=1, step=6, moment="backward")
            .kill(rank=1, step=6, moment="receiving")
            .kill(rank=0, step=12, moment=agreeing)
            .kill(rank=1, step=12, moment="backward"),
        ),
    }


def run(folder: Path, strategy: Any, workers: int, faults: Faults) -> tuple[Account, Sequence[JobEvent]]:
    """A job; what it wrote down, and its events."""
    (folder / "trace").mkdir()
    handle = er.ElasticTrainer(
        train,
        train_loop_config={"trace": str(folder / "trace"), "strategy": strategy, "pause_s": 0.01},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
        elastic_config=er.ElasticConfig(faults=faults),
    ).submit()
    handle.result(timeout=180)
    return account(folder / "trace"), handle.events()


def check(strategy: str, found: Account, events: list[Any], kills: int) -> None:
    """What every strategy promises, and what this one does."""
    lost = sum(event.from_workers - event.to_workers for event in events if event.kind is EventKind.FAILURE)
    assert lost == kills, [(event.kind, event.reason) for event in events]
    assert len(found.steps) == STEPS and found.final
    assert all(each == found.final[0] for each in found.final), "all end with one model"
    losses, wanted = by_torch()
    curve = [step.loss for step in found.steps]
    if strategy in EXACT:
        np.testing.assert_allclose(curve, losses, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.final[0], wanted, rtol=0, atol=1e-5)
    elif strategy in COMPRESSED:
        assert all(each == step.weights[0] for step in found.steps for each in step.weights), "bit-identical"
    # Averages leave out what the dead have learnt since the last one.
    assert sum(curve[-6:]) < (1.6 if strategy in AVERAGED else 1.25) * sum(losses[-6:]), "the last epoch's loss"


def check_goes_on_from_the_mean(found: Account, at: Sequence[int]) -> None:
    """A step that nobody has applied is drawn again from the mean of what those hold who are left."""
    for step in at:
        lost = np.array(found.steps[step].lost)
        assert len(lost) == found.steps[step].world
        np.testing.assert_allclose(found.steps[step].weights[0], lost.mean(0), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_an_owner_is_killed(ray_cluster: Any, tmp_path: Path) -> None:
    found, events = run(tmp_path, PS(), 3, Faults().kill(rank=0, step=9, moment="allreduce"))
    check("ps", found, events, 1)


@pytest.mark.slow
@pytest.mark.parametrize("script", scripts(True))
@pytest.mark.parametrize("strategy", [*EXACT, *COMPRESSED, *AVERAGED])
def test_workers_are_killed(ray_cluster: Any, tmp_path: Path, strategy: str, script: str) -> None:
    workers, faults = scripts(strategy in AVERAGED)[script]
    found, events = run(tmp_path, {**EXACT, **COMPRESSED, **AVERAGED}[strategy], workers, faults)
    check(strategy, found, events, len(faults.script))
    if script == "before a step is agreed on":
        check_goes_on_from_the_mean(found, [4, 9])
