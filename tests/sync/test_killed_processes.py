"""Worker processes get SIGKILL, in a step or in a regroup: each strategy keeps its promise to those that are left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from elastic_ray.sync import PS, SMA, AllReduce, LocalSGD, PairAveraging, Parallax, PowerSGD, Wire
from tests.sync.killed import STEPS, Account, account, by_torch, train

pytestmark = [pytest.mark.ray_cluster(num_cpus=16), pytest.mark.timeout(180)]

EXACT: dict[str, Any] = {"ps": PS(), "parallax": Parallax()}
COMPRESSED: dict[str, Any] = {"powersgd": PowerSGD(rank=1), "int8": AllReduce(wire=Wire(dtype="int8"))}
AVERAGED: dict[str, Any] = {"local_sgd": LocalSGD(period=3), "pair": PairAveraging(), "sma": SMA(alpha=0.3)}
BEFORE = ("forward", "backward", "allreduce")
AFTER = ("optimizer_step", "after_step", "edge")
STEP = 9  # a multiple of LocalSGD's period


def scripts() -> dict[str, Faults]:
    """Rank 1, or the owner of everything; then one of those that regroup."""
    made = {moment: Faults().kill(rank=1, step=STEP, moment=moment) for moment in (*BEFORE, *AFTER)}
    made["owner"] = Faults().kill(rank=0, step=STEP, moment="allreduce")
    made["regroup"] = Faults().kill(rank=1, step=STEP, moment="backward").kill(rank=1, step=STEP, moment="receiving")
    made["neighbours"] = Faults().kill(rank=0, step=STEP, moment="allreduce").kill(rank=1, step=STEP, moment="backward")
    return made


def run(folder: Path, strategy: Any, faults: Faults) -> tuple[Account, list[Any]]:
    """A job of three workers; what it wrote down, and its events."""
    (folder / "trace").mkdir()
    handle = er.ElasticTrainer(
        train,
        train_loop_config={"trace": str(folder / "trace"), "strategy": strategy, "pause_s": 0.01},
        scaling_config=ray.train.ScalingConfig(num_workers=3, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
        elastic_config=er.ElasticConfig(faults=faults),
    ).submit()
    handle.result(timeout=100)
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
    assert sum(curve[-6:]) == pytest.approx(sum(losses[-6:]), rel=0.25), "the last epoch's loss"


def test_an_owner_is_killed(ray_cluster: Any, tmp_path: Path) -> None:
    found, events = run(tmp_path, EXACT["ps"], scripts()["owner"])
    check("ps", found, events, 1)


@pytest.mark.slow
@pytest.mark.parametrize("script", scripts())
@pytest.mark.parametrize("strategy", [*EXACT, *COMPRESSED, *AVERAGED])
def test_workers_are_killed(ray_cluster: Any, tmp_path: Path, strategy: str, script: str) -> None:
    faults = scripts()[script]
    found, events = run(tmp_path, {**EXACT, **COMPRESSED, **AVERAGED}[strategy], faults)
    check(strategy, found, events, len(faults.script))
