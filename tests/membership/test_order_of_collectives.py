"""Two communicators never have collectives under way at once, in whatever order groups form on each rank.

NCCL may wait for ever where two ranks start collectives of two communicators in another order. gloo stands in for it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.communication.communicator import Communicator, GradientGroup
from elastic_ray.loop.api import current_session
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.state.tree import receive_state, send_state
from elastic_ray.sync.engine.gradient_engine import GradientEngine
from tests.loop.changing import Change, Kill, run_job
from tests.membership.groups import on_ranks
from tests.sync.sharded_parameters.sharded import BATCH, Net, data

STARTS: dict[type, tuple[str, ...]] = {
    Communicator: ("all_reduce", "broadcast", "send", "receive"),
    GradientGroup: ("all_reduce", "all_gather", "all_to_all", "reduce", "broadcast"),
}
PAIRS = ("send", "receive")  # of two ranks alone


class Recorder:
    """What each thread has started, in order: name of the group, operation, elements; and what was still under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        self.overlaps: list[str] = []
        self._works: dict[int, list[tuple[str, Any]]] = defaultdict(list)
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []
        make = Communicator.__init__

        def named(communicator: Communicator, store: Any, prefix: str, **options: Any) -> None:
            make(communicator, store, prefix, **options)
            self._kept.append(communicator)  # so that no other gets its id
            self._names[id(communicator)] = self._names[id(communicator.gradients)] = prefix

        monkeypatch.setattr(Communicator, "__init__", named)
        for kind, operations in STARTS.items():
            for operation in operations:
                monkeypatch.setattr(kind, operation, self._recording(operation, getattr(kind, operation)))

    def _recording(self, operation: str, start: Any) -> Any:
        def record(group: Any, tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
            name, thread = self._names.get(id(group), "alone"), threading.get_ident()
            for other, work in self._works[thread]:
                if other != name and work is not None and not work.is_completed():
                    self.overlaps.append(f"{operation} of {name} starts while {other} has one under way")
            if threading.current_thread().name.startswith("form-"):
                self.overlaps.append(f"{operation} starts while a group forms beside the present one")
            size = 0 if operation == "all_to_all" else tensor.numel()  # there each rank has its own
            self.started[thread].append((name, operation, size))
            work = start(group, tensor, *rest, **options)
            self._works[thread].append((name, work))
            return work

        return record

    def of_groups(self) -> dict[str, list[list[tuple[str, int]]]]:
        """For each group what each of its ranks has started together with the others."""
        found: dict[str, list[list[tuple[str, int]]]] = defaultdict(list)
        for started in self.started.values():
            for name in dict.fromkeys(name for name, _, _ in started):
                found[name].append([(o, n) for group, o, n in started if group == name and o not in PAIRS])
        return found


def train(strategy: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {} if strategy == "all_reduce" else {"strategy": strategy}
    wrapped: Any = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", **options)
    for _ in er.remaining_epochs_until(2):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("strategy", ["all_reduce", "zero1", "zero2"])
def test_two_groups_never_have_collectives_at_once(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    recorder = Recorder(monkeypatch)
    changes = (Change(3, (1, 2, 3)), Change(6, (1, 3, 4)), Change(10, (1, 4)))
    assert run_job(lambda: train(strategy), changes, first=(1, 2)).groups[-1] == (1, 4)
    assert not recorder.overlaps
    for started in recorder.started.values():
        numbers = [int(name.rpartition("/")[2]) for name, _, _ in started if name != "alone"]
        assert numbers == sorted(numbers), "an older group was used once more"
    groups = recorder.of_groups()
    assert len(groups) >= 4
    for name, ranks in groups.items():
        for each in ranks[1:]:
            differs = [(i, a, b) for i, (a, b) in enumerate(zip(ranks[0], each, strict=False)) if a != b]
            assert not differs and len(each) == len(ranks[0]), f"{name}: {differs[:4]}, {len(ranks[0])}, {len(each)}"


def test_a_group_is_left_when_no_rank_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's groups: what a rank that leaves has not sent yet never arrives."""
    hand_over, take = GradientEngine.before_change, WorkerMembership.take
    ended: list[str] = []
    seen: list[int] = []

    def slow(engine: GradientEngine, stays: Sequence[bool]) -> None:
        hand_over(engine, stays)
        worker = current_session().worker
        time.sleep(0.5 * (worker == "w2"))  # the other one would leave meanwhile
        ended.append(worker)

    def noting(membership: WorkerMembership, generation: int) -> Any:
        if membership.communicator is not None and membership.communicator.world_size > 1:
            seen.append(len(ended))
        return take(membership, generation)

    monkeypatch.setattr(GradientEngine, "before_change", slow)
    monkeypatch.setattr(WorkerMembership, "take", noting)
    assert run_job(lambda: train("zero2"), (Change(4, (1,)),), first=(1, 2)).groups[-1] == (1,)
    assert seen == [2, 2] and sorted(ended) == ["w1", "w2"]


@pytest.mark.parametrize(("strategy", "times"), [("all_reduce", 0), ("zero2", 3), ("int8", 5)])
def test_pairs_connect_when_all_enter_a_group(monkeypatch: pytest.MonkeyPatch, strategy: str, times: int) -> None:
    """Else a joiner, late in its first step, would let the first exchange of the others fail over NCCL."""
    connected: list[int] = []
    monkeypatch.setattr(Communicator, "connect_pairs", lambda communicator: connected.append(communicator.world_size))
    assert run_job(lambda: train(strategy), (Change(4, (1, 2, 3)),), first=(1, 2)).groups[-1] == (1, 2, 3)
    assert len(connected) == times


def test_a_state_is_sent_when_its_receiver_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there, sent = threading.Event(), list[bool]()
    batch = Communicator.batch

    def noting(communicator: Communicator) -> Any:
        if communicator.rank == 0:
            sent.append(there.is_set())
        return batch(communicator)

    monkeypatch.setattr(Communicator, "batch", noting)

    def work(communicator: Communicator) -> float:
        if communicator.rank == 0:
            send_state(communicator, 1, {"x": {"w": torch.ones(3)}})
            return 3.0
        time.sleep(0.3)  # the sender would begin meanwhile
        there.set()
        trees, _ = receive_state(communicator, 0, lambda key: None)
        return float(trees["x"]["w"].sum())

    assert on_ranks(2, work) == [3.0, 3.0] and sent == [True]


def test_a_broken_group_is_used_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    run_job(lambda: train("zero2"), (Kill(4, 3, "allreduce"),), first=(1, 2, 3))
    for started in recorder.started.values():
        numbers = [int(name.rpartition("/")[2]) for name, _, _ in started if name != "alone"]
        assert numbers == sorted(numbers)
