"""When a rank is ready to write its part of a checkpoint; no group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.saver import CopyBuffers, PartSaver
from elastic_ray.consensus.saving import Readiness, SaveOrder
from elastic_ray.state.resume_point import ResumePoint
from placement.storage.storage_calls import StorageCalls
from tests.sync.tiles.saving import wait_until

READY, NOT_YET, NEVER = Readiness.READY, Readiness.NOT_YET, Readiness.NEVER


class States:
    """Of one tensor."""

    def __init__(self) -> None:
        self.tensor = torch.arange(3.0)

    def capture_part(self, rank: int, world_size: int) -> dict[str, Any]:
        return {"model/0": {"weight": self.tensor}}


class Rank:
    """A rank that saves."""

    def __init__(self, folder: Path) -> None:
        storage = RunStorage(str(folder))
        storage.create()
        self.states, self.busy = States(), False
        self.saver = PartSaver(
            self.states,
            storage,
            StorageCalls(storage.where),
            workers=tuple,
            busy=lambda: self.busy,
            timeout_s=60.0,
        )

    @property
    def buffers(self) -> CopyBuffers:
        return self.saver._buffers

    def ask(self) -> Readiness:
        """Whether it is ready; it then continues until what it has begun is there."""
        answer = self.saver.readiness(0, 2, now=False)
        calls = (self.saver._looking, self.saver._making)
        wait_until(lambda: all(call is None or call.answer.done() for call in calls))
        return answer


def test_a_rank_knows_its_readiness_without_its_state(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    stands = rank.saver.standing
    assert stands() is NOT_YET and rank.ask() is NOT_YET  # it looks for the directory
    assert stands() is NOT_YET and rank.ask() is NOT_YET  # it makes memory
    assert stands() is READY and rank.ask() is READY
    rank.busy = True
    assert stands() is NOT_YET, "another one is being written"
    rank.busy = False
    rank.saver.start()
    assert stands() is NOT_YET, "it may write another part in a new group"
    assert rank.ask() is READY and stands() is READY
    rank.buffers.make([])
    assert stands() is NOT_YET, "a whole checkpoint has taken the memory"
    rank.saver.refuse("because")
    assert stands() is NEVER


def test_memory_made_for_another_group_does_not_count(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    make = rank.buffers.make

    def make_later(kinds: Any) -> None:
        rank.saver.start()  # the group has changed meanwhile
        make(kinds)

    rank.buffers.make = make_later
    assert rank.ask() is rank.ask() is NOT_YET and rank.saver.standing() is NOT_YET


def test_a_state_with_other_tensors_is_copied_afresh(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    while rank.saver.standing() is not READY:
        rank.ask()
    rank.states.tensor = torch.arange(5.0)
    order = SaveOrder(token="7", rank=0, world_size=2)
    part = rank.saver.capture(order, ResumePoint(epoch=0, steps=7), copy=True)
    rank.states.tensor += 1.0
    assert part is not None
    (copied,) = part.tensors
    ((_, tensor),) = copied.pieces.held
    assert torch.equal(tensor, torch.arange(5.0))
