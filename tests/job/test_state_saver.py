"""What becomes of automatic checkpoints where memory is short; no Ray."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.saver import CopyBuffers, kinds_of
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.messages import StateSaved
from elastic_ray.worker.state_saver import StateSaver
from tests.sync.tiles.saving import wait_until


class Rank0:
    """A session as its saver sees it: one tensor of state, at step 7."""

    rank, job, run = 0, "j", SimpleNamespace(wishes=None)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.captures = 0
        self.told: list[str] = []

    def may_save(self) -> bool:
        return True

    def notify(self, kind: str, text: str) -> None:
        self.told.append(f"{kind}: {text}")

    @property
    def states(self) -> Rank0:
        return self

    def capture_to_save(self) -> dict[str, Any]:
        self.captures += 1
        return {"model/0": {"weight": self.tensor}, "shape": None}

    def resume_point(self) -> ResumePoint:
        return ResumePoint(epoch=0, steps=7)


def saver_of(session: Any, folder: Path, told: list[StateSaved]) -> StateSaver:
    def tell(saved: StateSaved) -> float:
        told.append(saved)
        return 1e5

    return StateSaver(session, RunStorage(str(folder)), tell, keep=2, interval_s=1e-3)


def test_a_state_without_memory_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session, told = Rank0(torch.ones(1).expand(1 << 55)), list[StateSaved]()  # in memory it is one number
    saver = saver_of(session, tmp_path, told)
    with caplog.at_level(logging.WARNING, "elastic_ray"):
        for _ in range(20):
            time.sleep(0.005)  # a step
            saver.between_steps()
            wait_until(lambda: not saver._parts.makes_memory)
    assert session.captures == 1 and not told
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert "no automatic checkpoints: there is no memory for a copy of the state: " in warning
    session.tensor = torch.ones(1)
    assert saver.save() == "" and len(told) == 1, "of a preempted job nothing is copied"
    assert [state.steps for state in state_files(RunStorage(str(tmp_path)))] == [7]


def test_copy_does_without_pinned_memory_where_there_is_none() -> None:
    state = torch.ones(3)
    buffers = CopyBuffers()
    buffers.make([(state.shape, state.dtype, True)])  # as of a GPU's; without CUDA no memory can be pinned
    assert buffers.fit([state])


def test_buffers_serve_a_state_that_holds_gradients_at_times() -> None:
    weight, moment, gradient = torch.ones(3), torch.ones(2), torch.ones(3)
    buffers = CopyBuffers()
    assert buffers.fit([weight, moment]) is None
    buffers.make(kinds_of([weight, moment, gradient]))
    for tensors in ([weight, moment, gradient], [weight, moment], [gradient, weight]):
        found = buffers.fit(tensors)
        assert found is not None and [f.shape for f in found] == [t.shape for t in tensors]
        assert len({f.data_ptr() for f in found}) == len(tensors)
    assert buffers.fit([weight, gradient, torch.ones(3)]) is None
