"""What is counted as a worker's memory is enough, and not much more than enough, while rows move as well."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.checkpoints.automatic import StateFile, state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.driver.sharded_memory import sharded_memory
from elastic_ray.run.current import session_of_thread
from elastic_ray.sync.sharded_parameters.shard_statistics import MeanRows, ScatteredRows
from tests.loop.changing import Change, Kill, run_job
from tests.sync.sharded_parameters.live import Live
from tests.sync.tiles.saving import Job, read_checkpoint

LAYER_BYTES = (64 * 64 + 64) * 4
STEPS = 18  # the optimizer's state is warm, and statistics are measured in its units more than once


def _model(device: str) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def _trained() -> int:
    """The most bytes that a worker held, the end of the pass included."""
    with Live() as live:
        model = _model("meta")
        for block in model:
            er.fully_shard(block, device="cpu")
        er.fully_shard(model, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        loader = er.AdaptiveDataLoader(
            TensorDataset(torch.randn(STEPS * 12, 64, generator=torch.Generator().manual_seed(0))), batch_size=12
        )
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                optimizer.zero_grad()
                wrapped(x).pow(2).mean().backward()
                optimizer.step()
    er.barrier()
    kept = [each for each in gc.get_objects() if type(each) in (MeanRows, ScatteredRows)]
    assert not kept, "statistics have kept gradients of a step, as large as the whole model"
    return live.peak


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "script", "least"),
    [
        pytest.param((1, 2, 3, 4), [], 4, marks=pytest.mark.slow),
        pytest.param((1, 2, 3, 4), [Change(2, (2, 3, 4, 5))], 4, marks=pytest.mark.slow),
        ((1, 2, 3, 4, 5), [Kill(2, 2, "vote")], 4),
        ((1, 2, 3, 4), [Change(2, (1, 2))], 2),
    ],
)
def test_a_worker_holds_no_more_than_was_counted(
    first: tuple[int, ...], script: Sequence[Change | Kill], least: int
) -> None:
    # Two layers are gathered at one time, with the gradients of one; activations of a few samples are little.
    need = sharded_memory(_model("meta"), available_bytes=1 << 30, other_bytes=4 * LAYER_BYTES)
    peak = max(run_job(_trained, script, first=first).results.values())
    counted = need.need_bytes(least)
    print(first, script, f"{peak / counted:.2f} of what is counted")
    assert peak <= counted


def _resumed(folder: Path, read: Callable[[RunStorage, StateFile], dict[str, Any]]) -> float:
    """The most bytes that a worker holds until its first step, in whole parameters; it continues from a checkpoint."""
    storage = RunStorage(str(folder))

    def train() -> float:
        session = session_of_thread()
        assert session is not None
        with Live() as live:
            model = _model("meta")
            whole = sum(p.numel() for p in model.parameters()) * 4
            for block in model:
                er.fully_shard(block, device="cpu")
            er.fully_shard(model, device="cpu")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
            session.states.resume(read(storage, state_files(storage)[0]), loaded=True)
            loader = er.AdaptiveDataLoader(
                TensorDataset(torch.randn(96, 64, generator=torch.Generator().manual_seed(0))), batch_size=12
            )
            for _ in er.remaining_epochs_until(1):
                peak = 0
                for (x,) in loader:
                    peak = peak or live.peak
                    optimizer.zero_grad()
                    wrapped(x).pow(2).mean().backward()
                    optimizer.step()
        return peak / whole

    return max(run_job(train, first=(1, 2, 3, 4)).results.values())


@pytest.mark.thorough
def test_a_continued_worker_holds_its_rows_and_one_layer(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = _model("cpu")
        for block in model:
            er.fully_shard(block)
        return er.fully_shard(model)

    def data() -> TensorDataset:
        return TensorDataset(
            torch.randn(96, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(96, dtype=torch.long)
        )

    Job(tmp_path, strategy=None, make=make, data=data, at=(2,)).run((1, 2, 3, 4))
    # Of four workers each holds two quarters of parameters and two states, and one layer of six while that is read.
    assert _resumed(tmp_path, functools.partial(open_checkpoint, least_bytes=1024)) < 3 * (2 / 4 + 1 / 6) + 0.1
    assert _resumed(tmp_path, read_checkpoint) > 3, "as is seen where all is read"
