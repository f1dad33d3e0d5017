"""Ways of an all-reduce through the group: every part is added once, and what crosses between nodes is little."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.communication.background_work import TransferThreads
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.sync import AllReduce, Strategy, StrategyError
from elastic_ray.sync.builders import resolve_strategy
from elastic_ray.sync.choosing.explanation import explain
from elastic_ray.sync.engine.reduction import carries_tail, make_operation
from elastic_ray.sync.operations.buckets import Bucket
from elastic_ray.sync.operations.topologies import SCHEDULES, Round
from elastic_ray.sync.plan import BucketPlan, ModelProfile, ParamInfo, Topology, lower
from elastic_ray.sync.spec import Reduce, Rows, Rule, Wire
from tests.membership.groups import on_ranks

nodes_of_ranks = st.lists(st.integers(0, 3), min_size=2, max_size=9)
TWO_NODES = (0, 1, 0, 1, 0)
WAIT_S = 30.0


def carried_out(rounds: Sequence[Round], nodes: Sequence[int], size: int) -> list[list[frozenset[int]]]:
    """Whose numbers each rank's sum holds, element by element; a number that is added twice fails."""
    held = [[frozenset([rank])] * size for rank in range(len(nodes))]
    for each in rounds:
        before = [list(row) for row in held]
        for (source, destination), (begin, end) in each.transfers.items():
            assert source != destination and 0 <= begin <= end <= size
            for at in range(begin, end):
                if each.adds:
                    assert not held[destination][at] & before[source][at], "added twice"
                    held[destination][at] |= before[source][at]
                else:
                    assert len(before[source][at]) == len(nodes), "a receiver may not have sent its part yet"
                    held[destination][at] = before[source][at]
    return held


@pytest.mark.parametrize("topology", list(SCHEDULES))
@given(nodes=nodes_of_ranks, size=st.integers(0, 17))
def test_each_ranks_part_is_added_exactly_once(topology: str, nodes: list[int], size: int) -> None:
    everybody = [[frozenset(range(len(nodes)))] * size] * len(nodes)
    assert carried_out(SCHEDULES[topology](nodes, size), nodes, size) == everybody


@given(nodes=st.lists(st.integers(0, 3), min_size=2, max_size=12), size=st.integers(0, 40))
def test_a_node_sends_at_most_two_shares_to_others(nodes: list[int], size: int) -> None:
    size *= 12  # so that all parts are whole
    there = len(set(nodes))
    for node in set(nodes):
        sent = sum(
            end - begin
            for each in SCHEDULES["two_level"](nodes, size)
            for (source, destination), (begin, end) in each.transfers.items()
            if nodes[source] == node != nodes[destination]
        )
        assert sent <= 2 * size * (there - 1) / there + 4 * there * there


@given(nodes=nodes_of_ranks)
def test_rounds_are_as_many_as_said(nodes: list[int]) -> None:
    world = len(nodes)
    assert len(SCHEDULES["ring"](nodes, 64)) == 2 * (world - 1)
    assert len(SCHEDULES["tree"](nodes, 64)) == 2 * (world - 1).bit_length()
    assert len(SCHEDULES["star"](nodes, 64)) == 2
    assert len(SCHEDULES["two_level"](nodes, 64)) <= 4


@given(nodes=nodes_of_ranks)
def test_neighbours_in_the_ring_share_a_node(nodes: list[int]) -> None:
    pairs = SCHEDULES["ring"](nodes, 64)[0].transfers
    crossing = sum(nodes[source] != nodes[destination] for source, destination in pairs)
    there = len(set(nodes))
    assert crossing == (there if there > 1 else 0)


def plan(topology: str, nodes: tuple[int, ...]) -> BucketPlan:
    return BucketPlan(params=(0, 1), group=0, sync=Reduce(topology=topology), nodes=nodes)


def own(rank: int) -> torch.Tensor:
    return torch.randn(38, generator=torch.Generator().manual_seed(rank))


def test_late_rank_is_waited_for_longer_than_groups_form() -> None:
    formed: list[int] = []

    def work(communicator: Communicator) -> list[float]:
        formed.append(communicator.rank)
        if communicator.rank:
            time.sleep(1.5)  # later than the group had to form within
        bucket, operation = Bucket(0, 0, [torch.nn.Parameter(torch.zeros(4))], 0), make_operation(plan("ring", (0, 1)))
        bucket.flat.fill_(1.0)
        for each in operation.launch(bucket, communicator.gradients):
            communicator.wait(each)
        if communicator.rank:
            time.sleep(1.5)  # the same for a receive of user code
            communicator.wait_all([communicator.send(torch.ones(1), 0, 99)])
        else:
            communicator.wait_all([communicator.receive(torch.zeros(1), 1, 99)])
        return [float(each) for each in bucket.flat]

    for _ in range(10):  # a busy machine may take longer to form it
        formed.clear()
        found = on_ranks(2, work, form_s=1.0)
        if len(formed) == 2:
            break
    assert found == [[2.0] * 4] * 2


def reduce(bucket: Bucket, operation: Any, communicator: Communicator) -> None:
    """Add up the bucket of all ranks, round by round."""
    works, finished = operation.launch(bucket, communicator.gradients), 1
    while works:
        for each in works:
            communicator.wait(each)
        works = operation.next_round(bucket, communicator.gradients, finished)
        finished += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topology", list(SCHEDULES))
def test_ranks_of_a_real_group_hold_equal_bits(topology: str, dtype: torch.dtype) -> None:
    def work(communicator: Communicator) -> tuple[torch.Tensor, int, int]:
        params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((7, 5), (3,))]
        bucket, operation = Bucket(0, 0, params, 0), make_operation(plan(topology, TWO_NODES))
        for step in (1, 2):
            with torch.no_grad():
                bucket.flat.copy_(step * own(communicator.rank))
                reduce(bucket, operation, communicator)
        return bucket.flat.clone(), communicator.traffic["all_reduce"], communicator.traffic["send"]

    results = on_ranks(len(TWO_NODES), work)
    wanted = 2 * torch.stack([own(rank) for rank in range(len(TWO_NODES))]).sum(0)
    for each in results:
        if isinstance(each, Exception):
            raise each
    for flat, reduced, _ in results:
        assert torch.equal(flat, results[0][0]), "not the same bits"
        torch.testing.assert_close(flat.float(), wanted, rtol=0.02, atol=0.1)
        assert not reduced, "the backend's own way was taken"
    spans = [each.transfers.values() for each in SCHEDULES[topology](TWO_NODES, 38)]
    elements = sum(end - begin for begin, end in itertools.chain(*spans))
    assert sum(sent for *_, sent in results) == 2 * elements * dtype.itemsize


@pytest.mark.parametrize("topology", list(SCHEDULES))
def test_rounds_of_gpus_give_the_bits_of_cpus(monkeypatch: pytest.MonkeyPatch, topology: str) -> None:
    """On GPUs each round is one all_to_all, which a CPU can make as well."""

    def work(communicator: Communicator) -> torch.Tensor:
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((7, 5), (3,))]
        bucket, operation = Bucket(0, 0, params, 0), make_operation(plan(topology, TWO_NODES))
        with torch.no_grad():
            bucket.flat.copy_(own(communicator.rank))
            reduce(bucket, operation, communicator)
        return bucket.flat.clone()

    cpu = on_ranks(len(TWO_NODES), work)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for found, wanted in zip(on_ranks(len(TWO_NODES), work), cpu, strict=True):
        assert torch.equal(found, wanted)


def test_sums_under_way_at_once_do_not_mix() -> None:
    """Buckets of several models, or of several topologies, may have one number, or other numbers of rounds."""
    names = ("ring", "star", "ring", "two_level")

    def work(communicator: Communicator) -> list[torch.Tensor]:
        found = []
        for step in range(5):
            works, buckets = [], []
            for number, name in enumerate(names):
                bucket = Bucket(0, 0, [torch.nn.Parameter(torch.zeros(20 + number))], 0)
                bucket.flat.fill_(float(10**number * (step + communicator.rank)))
                works += make_operation(plan(name, TWO_NODES[:3])).launch(bucket, communicator.gradients)
                buckets.append(bucket)
            for each in works:
                communicator.wait(each)
            found += [bucket.flat for bucket in buckets]
        return found

    wanted = [torch.full((20 + at,), float(10**at * (3 * step + 3))) for step in range(5) for at in range(4)]
    for found in on_ranks(3, work):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("ending", ["a lost peer", "void"])
def test_rounds_end_with_their_group(ending: str) -> None:
    ended = threading.Barrier(3)

    def work(communicator: Communicator) -> str:
        if communicator.rank == 0:
            if ending == "a lost peer":
                communicator.leave(2.0)
            ended.wait(WAIT_S)  # else Python's collector may end its connections
            return "gone"
        bucket = Bucket(0, 0, [torch.nn.Parameter(torch.zeros(5))], 0)
        works = make_operation(plan("star", TWO_NODES[:3])).launch(bucket, communicator.gradients)
        if ending == "void":
            threading.Timer(0.2, communicator.void).start()
        since_s = time.monotonic()
        with pytest.raises(CommunicationFailedError) as told:
            communicator.wait(works[0])
        assert communicator.broken and time.monotonic() - since_s < WAIT_S, "not before the group's timeout"
        ended.wait(WAIT_S)
        communicator.leave(2.0)
        return str(told.value)

    gone, *others = on_ranks(3, work, timeout_s=2 * WAIT_S)
    assert gone == "gone"
    assert all(isinstance(told, str) for told in others), others
    # The rank that calls off first is a lost peer to the other one.
    assert any("called off" in told for told in others) == (ending == "void"), others


def test_a_fault_of_the_code_is_no_lost_peer() -> None:
    def fail() -> None:
        raise TypeError("a fault")

    with pytest.raises(TypeError, match="a fault"):
        TransferThreads().start(fail).wait()


def test_a_failed_transfer_keeps_nothing_alive() -> None:
    class Backend:
        def fail(self) -> None:
            raise RuntimeError("the peer is gone")

    backend = Backend()
    there = weakref.ref(backend)
    work = TransferThreads().start(functools.partial(Backend.fail, backend))
    del backend
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="the peer is gone"):
            work.wait()
        until_s = time.monotonic() + WAIT_S
        while there() is not None and time.monotonic() < until_s:
            time.sleep(0.001)  # the thread returns
        assert work.is_completed() and there() is None
    finally:
        gc.enable()


def test_transfers_keep_their_order_until_one_fails() -> None:
    threads, go, order = TransferThreads(1), threading.Event(), list[int]()

    def transfer(number: int) -> None:
        assert go.wait(20.0)
        order.append(number)
        if number == 50:
            raise RuntimeError("the peer is gone")

    before = threading.active_count()
    works = [threads.start(functools.partial(transfer, number)) for number in range(100)]
    assert threading.active_count() <= before + 1 and not any(each.is_completed() for each in works)
    go.set()
    works[49].wait()
    for each in (works[50], works[99], threads.start(functools.partial(transfer, 100))):
        with pytest.raises(RuntimeError, match="gone"):
            each.wait()
    assert order == list(range(51))


def _wait_for(event: threading.Event) -> None:
    event.wait(20.0)


def test_a_short_wait_for_transfers_leaves_them_alone() -> None:
    go = threading.Event()
    work = TransferThreads().start(functools.partial(_wait_for, go))
    with pytest.raises(RuntimeError, match="not ended"):
        work.wait(timedelta(milliseconds=1))
    assert not work.is_completed()
    go.set()
    work.wait()
    assert work.is_completed()


def test_control_values_ride_on_any_way() -> None:
    assert carries_tail(plan("two_level", TWO_NODES), torch.float32)


def model() -> ModelProfile:
    return ModelProfile(params=(ParamInfo(names=("w",), shape=(64, 64)),))


@pytest.mark.parametrize(
    ("nodes", "way"), [("aab", "two_level"), ("aaa", "native"), ("abc", "native"), ("a", "native")]
)
def test_two_levels_need_two_nodes_one_of_them_shared(nodes: str, way: str) -> None:
    made = resolve_strategy("two_level").build(model(), Topology(nodes=tuple(nodes)))
    found = lower(made, model(), Topology(nodes=tuple(nodes)))
    (bucket,) = found.buckets
    assert isinstance(bucket.sync, Reduce) and bucket.sync.topology == way
    assert ("two_level" in explain(found, model(), Topology(nodes=tuple(nodes))).rows[0].what) == (way != "native")


@pytest.mark.parametrize(
    ("domains", "levels"),
    [("xxyy", (0, 0, 1, 1)), ("xyxy", (0, 1, 0, 1)), ("xxxx", (0, 0, 1, 2)), ("", (0, 0, 1, 2))],
    ids=["two domains", "of scattered ranks", "one domain is no level", "no labels"],
)
def test_two_levels_are_the_domains_that_labels_name(domains: str, levels: tuple[int, ...]) -> None:
    topology = Topology(nodes=tuple("aabc") if domains != "xyxy" else tuple("abcd"), domains=tuple(domains))
    two_level = lower(Strategy(default=Reduce(topology="two_level")), model(), topology)
    assert two_level.buckets[0].nodes == levels and not topology.why_flat
    ring = lower(Strategy(default=Reduce(topology="ring")), model(), topology)
    order = (
        [domains[rank] for rank in sorted(range(4), key=lambda rank: ring.buckets[0].nodes[rank])] if domains else []
    )
    assert order == sorted(order), "nodes of one domain are neighbours"


@pytest.mark.parametrize(("nodes", "why"), [("aaa", "on one node"), ("abc", "no two ranks"), ("aab", "")])
def test_why_two_levels_are_one_is_a_sentence(nodes: str, why: str) -> None:
    found = Topology(nodes=tuple(nodes)).why_flat
    assert why in found and bool(found) == bool(why)


def test_another_topology_leaves_the_rest_as_it_is() -> None:
    table, bias = Rule(pattern="table", sync=Rows()), Rule(pattern="bias", sync=Reduce(bucket_bytes=4096))
    first = Strategy(rules=(table, bias), default=Reduce(), name="parallax")
    ring = first.with_topology("ring")
    assert [rule.sync for rule in ring.rules] == [Rows(), Reduce(bucket_bytes=4096, topology="ring")]
    assert ring.default == Reduce(topology="ring") and ring.name == "parallax by ring" and ring.asks_for("ring")
    assert ring.with_topology("tree").name == "parallax by tree" and ring.with_topology("native") == first
    named = resolve_strategy("ring").build(model(), Topology())
    assert resolve_strategy("all_reduce").build(model(), Topology()).with_topology("ring") == named
    assert named.with_topology("native") == resolve_strategy("all_reduce").build(model(), Topology())


@pytest.mark.parametrize(
    ("name", "why"), [("bf16", "native wire"), ("ps", "all-reduced"), ("local_sgd", "local_sgd has none")]
)
def test_topology_of_what_cannot_have_one_is_refused(name: str, why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        resolve_strategy(name).build(model(), Topology()).with_topology("ring")


def test_plans_differ_where_ranks_are_elsewhere() -> None:
    ring = Strategy(default=Reduce(topology="ring"))
    digests = {lower(ring, model(), Topology(nodes=nodes)).digest for nodes in itertools.permutations("aab")}
    assert len(digests) == 3
    native = {lower(Strategy(), model(), Topology(nodes=nodes)).digest for nodes in itertools.permutations("aab")}
    assert len(native) == 1


def test_a_topology_travels_as_json() -> None:
    made = AllReduce(topology="ring").build(model(), Topology())
    assert Strategy.from_json(made.to_json()) == made and json.loads(made.to_json())["default"]["topology"] == "ring"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "mesh"}, r"topology must be one of .*two_level.*'mesh'"),
        ({"topology": "ring", "parts": 2}, r"Reduce\.topology must be 'native' where parts is above 1"),
        ({"topology": "tree", "wire": Wire(dtype="bf16")}, r"use one part and the native wire"),
    ],
)
def test_what_no_way_can_do_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Reduce(**options)
