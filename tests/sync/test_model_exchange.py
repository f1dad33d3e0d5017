"""Models that ranks publish, and pull from each other without waiting: whole, finite, newest, only between ranks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic_ray.communication.model_exchange import ModelExchange
from elastic_ray.loop.api import current_session
from elastic_ray.sync import LocalSGD, PairAveraging
from elastic_ray.sync.averaging.algorithms import PairAverager
from elastic_ray.sync.averaging.drift import Replica
from tests.loop.changing import Change, Kill, run_job
from tests.loop.ranks import Ranks
from tests.sync.drifting import STEPS, Loop

LAYOUT, SIZE = 7, 1 << 18
WAIT_S = 30.0
Two = tuple[list[Replica], list[dict[str, torch.Tensor]]]
"""Replicas of two ranks in one process, and the parameters of each."""


class Told:
    """What ranks need of a communicator: all in one process, and each tells the others."""

    host, timeout_s, broken = "127.0.0.1", WAIT_S, False

    def __init__(self, rank: int, texts: dict[int, bytes], barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self._texts, self._barrier = rank, barrier.parties, texts, barrier

    def broadcast_bytes(self, content: bytes, root: int) -> bytes:
        self._barrier.wait(WAIT_S)
        if self.rank == root:
            self._texts[root] = content
        self._barrier.wait(WAIT_S)
        return self._texts[root]

    def mark_broken(self) -> None:
        self.broken = True


@pytest.fixture
def three() -> Iterator[list[ModelExchange]]:
    made, barrier, texts = [ModelExchange() for _ in range(3)], threading.Barrier(3), dict[int, bytes]()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda r: made[r].enter(Told(r, texts, barrier), called_off=lambda: False), range(3)))
    yield made
    for each in made:
        each.close()


def pulled(exchange: ModelExchange, into: list[torch.Tensor], layout: int = LAYOUT) -> bool:
    """Pull once, and wait."""
    exchange.ask(layout, into)
    assert exchange._pulled is not None
    exchange._pulled.exception(WAIT_S)
    return exchange.arrived(into) is not None


def until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def alone(exchange: ModelExchange, peer: int) -> None:
    """Have the rank ask this other rank only."""
    assert exchange._pulls is not None
    exchange._pulls.peers = {peer: exchange._pulls.peers[peer]}


@pytest.fixture
def two() -> Iterator[Two]:
    made: list[Replica] = []
    barrier, texts = threading.Barrier(2), dict[int, bytes]()
    params = [{"w": torch.full((3,), 10.0)}, {"w": torch.full((3,), 20.0)}]
    told: list[Any] = [Told(rank, texts, barrier) for rank in range(2)]
    for each, named in zip(told, params, strict=True):
        context: Any = SimpleNamespace(
            group=SimpleNamespace(communicator=each), exchanges=[], membership=SimpleNamespace(voided=False)
        )
        trainable: Any = SimpleNamespace(named=named)
        made.append(Replica(trainable, context))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Replica.enter_exchange, made, told))
    yield made, params
    for replica in made:
        replica.exchange.close()


def test_steps_made_during_a_pull_count_in_full(two: Two) -> None:
    (first, second), (params, _) = two
    for dropped, wanted in ((False, 10.0 + (20.0 - 10.0) / 2 - 1.0), (True, 14.0 - 1.0)):
        second.publish(time.monotonic())
        first.publish(time.monotonic())
        if dropped:
            first.drop_pull()
        assert first.exchange._pulled is not None and first.exchange._pulled.result(WAIT_S)
        params["w"] -= 1.0
        PairAverager().mix(first, time.monotonic() + 60.0)
        assert params["w"].tolist() == [wanted] * 3
        assert first.exchange._pulled is not None and not first.exchange._pulled.result(WAIT_S), "it has that one"
        assert first.pulled(0.0) is None


@pytest.mark.parametrize(("ago_s", "own"), [(90.0, 9.0), (22.0, 9.0), (18.0, 9.0), (12.0, 8.0), (8.0, 8.0), (2.0, 7.0)])
def test_models_of_the_same_time_are_compared(two: Two, ago_s: float, own: float) -> None:
    """Two that this rank has published are held, and its present one."""
    (first, second), (params, _) = two
    alone(first.exchange, 1)
    now_s = time.monotonic()
    for at_s in (30.0, 20.0, 10.0):
        if at_s == 10.0:
            second.publish(now_s - ago_s)
        first.publish(now_s - at_s)
        assert first.exchange._pulled is not None
        first.exchange._pulled.exception(WAIT_S)
        if at_s > 10.0:
            assert first.pulled(now_s) is None, "nothing is published yet"
        params["w"] -= 1.0
    PairAverager().mix(first, now_s)
    assert params["w"].tolist() == [7.0 + (20.0 - own) / 2] * 3


def test_pull_from_before_unfreezing_is_ignored(two: Two) -> None:
    (first, second), (params, others) = two
    second.publish(time.monotonic())
    first.publish(time.monotonic())
    assert first.exchange._pulled is not None and first.exchange._pulled.result(WAIT_S)
    params["unfrozen"], others["unfrozen"] = torch.full((2,), 1.0), torch.full((2,), 3.0)
    second.publish(time.monotonic())
    PairAverager().mix(first, time.monotonic() + 60.0)
    assert params["w"].tolist() == [10.0] * 3
    assert first.exchange._pulled is not None and first.exchange._pulled.result(WAIT_S)
    PairAverager().mix(first, time.monotonic() + 60.0)
    assert params["w"].tolist() == [15.0] * 3 and params["unfrozen"].tolist() == [2.0] * 2


def test_a_rank_pulls_a_model_once(three: list[ModelExchange]) -> None:
    first, second, _ = three
    alone(first, 1)
    into = [torch.zeros(3), torch.zeros(2, dtype=torch.float64)]
    assert not pulled(first, into), "none is published yet"
    for value in (1.0, 2.0, 3.0):
        second.publish(LAYOUT, [torch.full((3,), value), torch.full((2,), -value, dtype=torch.float64)])
        assert pulled(first, into) and into[0].tolist() == [value] * 3 and into[1].tolist() == [-value] * 2
        assert not pulled(first, into), "it has that one"


def test_no_model_is_half_of_another(three: list[ModelExchange]) -> None:
    first, second, third = three
    stop = threading.Event()

    def publish() -> None:
        value = 0.0
        while not stop.is_set():
            value += 1.0
            second.publish(LAYOUT, [torch.full((SIZE,), value)])

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        found = list[float]()
        deadline_s = time.monotonic() + 20.0
        while len(found) < 12 and time.monotonic() < deadline_s:
            asking, into = (first, third)[len(found) % 2], [torch.zeros(SIZE)]
            alone(asking, 1)
            if pulled(asking, into):
                assert bool((into[0] == into[0][0]).all())
                found.append(float(into[0][0]))
    finally:
        stop.set()
        publishing.join()
    assert len(set(found)) > 3


def test_nothing_is_asked_where_no_rank_is_left(three: list[ModelExchange]) -> None:
    first, into = three[0], [torch.zeros(3)]
    assert first.ask(LAYOUT, into) and not first.ask(LAYOUT, into), "one pull at a time"
    assert first._pulled is not None and first._pulls is not None
    first._pulled.exception(WAIT_S)
    first.arrived(into)
    first._pulls.peers.clear()
    assert not first.ask(LAYOUT, into)


@pytest.mark.parametrize(("layout", "value"), [(LAYOUT, float("nan")), (LAYOUT, float("inf")), (LAYOUT + 1, 1.0)])
def test_no_unfit_model_is_taken(three: list[ModelExchange], layout: int, value: float) -> None:
    first, second, _ = three
    alone(first, 1)
    into = [torch.zeros(3)]
    second.publish(LAYOUT, [torch.ones(3)])
    assert pulled(first, into)
    second.publish(layout, [torch.tensor([1.0, value, 1.0])])
    assert not pulled(first, into) and into[0].tolist() == [1.0] * 3


def test_a_dead_rank_is_asked_no_more(three: list[ModelExchange]) -> None:
    first, second, third = three
    second.close()
    third.publish(LAYOUT, [torch.ones(3)])
    into = [torch.zeros(3)]
    pulls: Any = first._pulls
    until(lambda: not pulled(first, into) and 1 not in pulls.peers)
    third.publish(LAYOUT, [torch.full((3,), 2.0)])
    assert pulled(first, into) and into[0].tolist() == [2.0] * 3


def test_a_pull_ends_with_its_group(three: list[ModelExchange]) -> None:
    """The rank that is asked is stopped: it takes the connection, and never answers."""
    first, _, _ = three
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pulls: Any = first._pulls
        pulls.peers = {1: silent.getsockname()}
        first.ask(LAYOUT, [torch.zeros(3)])
        pull: Any = first._pulled
        connection, _ = silent.accept()
        with connection:
            first.close()
            assert pull.result(timeout=WAIT_S / 2) is None, "long before the group's timeout"


def test_strangers_are_told_nothing(three: list[ModelExchange]) -> None:
    first, second, _ = three
    second.publish(LAYOUT, [torch.ones(3)])
    assert first._pulls is not None
    with socket.create_connection(first._pulls.peers[1], timeout=WAIT_S) as stranger:
        stranger.sendall(b"x" * 16)
        assert stranger.recv(1) == b""


def test_a_pull_of_other_tensors_is_not_taken(three: list[ModelExchange]) -> None:
    first, second, _ = three
    alone(first, 1)
    second.publish(LAYOUT, [torch.ones(3)])
    before = [torch.zeros(3)]
    first.ask(LAYOUT, before)
    assert first._pulled is not None
    first._pulled.exception(WAIT_S)
    assert first.arrived([torch.zeros(3)]) is None


def wait_for_pull(step: int, model: torch.nn.Module) -> None:
    for exchange in current_session().run.exchanges:
        if exchange._pulled is not None:
            exchange._pulled.exception(WAIT_S)


def mixed(strategy: Any) -> Any:
    return Loop(strategy, inside=wait_for_pull)()


def mixed_in_step(strategy: Any) -> Any:
    """The same of two ranks that make each step at one time: further apart, they pull models of other steps."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False)

    def inside(step: int, model: torch.nn.Module) -> None:
        store.add(f"step {step}", 1)
        until(lambda: store.add(f"step {step}", 0) == 2)
        wait_for_pull(step, model)

    return Loop(strategy, inside=inside)()


def test_models_of_pairs_stay_closer(ranks: Ranks) -> None:
    """Than those of ranks that only train by themselves for as long."""
    apart = {}
    for strategy in (PairAveraging(period=5), LocalSGD(period=5)):
        (one, ours), (other, theirs) = ranks.run(mixed_in_step, strategy, world=2)
        assert torch.equal(one, other) and len(ours) == STEPS, "all end with one model"
        apart[type(strategy)] = float(torch.dist(ours[4].after, theirs[4].after))
    assert 0 < apart[PairAveraging] < 0.95 * apart[LocalSGD]


def test_pairs_survive_growth_shrinking_and_a_kill() -> None:
    script = [Change(1, (1, 2, 3, 4)), Change(6, (1, 2, 4)), Kill(9, 2, "backward")]
    outcome = run_job(lambda: mixed(PairAveraging(period=3)), script, first=(1, 2))
    found = [model for model, _ in outcome.results.values()]
    assert sorted(outcome.results) == [1, 4] and torch.equal(*found) and bool(found[0].isfinite().all())
