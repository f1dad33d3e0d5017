"""Which warm processes the cluster's pool keeps: pure decisions."""

from __future__ import annotations

import collections
import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elastic_ray.warm_pool.sizing import (
    End,
    PoolConfig,
    PooledProcess,
    PoolNode,
    ProcessRequest,
    Start,
    plan,
    read_config,
    remember,
)

MIB = 1 << 20


def request(job: str = "a", environment: str = "e", asked_s: float = 0.0, **nodes: int) -> ProcessRequest:
    return ProcessRequest(job=job, environment=environment, nodes=nodes, since_s=0.0, asked_s=asked_s)


def process(name: str, node: str = "n", environment: str = "e", *, ready: bool = True) -> PooledProcess:
    return PooledProcess(name=name, node=node, environment=environment, ready=ready, memory_bytes=300 * MIB)


def decide(config: PoolConfig | None = None, **given: object) -> list[Start | End]:
    values = {"nodes": [PoolNode(node="n")], "processes": [], "requests": [], "busy": {}, "now_s": 0.0, **given}
    return list(plan(config or PoolConfig(), **values))


def test_processes_start_one_by_one_until_demand_is_met() -> None:
    [start] = decide(requests=[request(n=2)])
    assert (start.node, start.environment) == ("n", "e") and "0 of 2" in start.reason
    assert decide(requests=[request(n=2)], processes=[process("p", ready=False)]) == []
    assert len(decide(requests=[request(n=2)], processes=[process("p")])) == 1
    assert decide(requests=[request(n=2)], processes=[process("p"), process("q")]) == []


def test_nothing_starts_beside_a_job_in_its_first_steps() -> None:
    assert decide(requests=[request(n=1)], busy={"n": 5.0}, now_s=4.9) == []
    assert len(decide(requests=[request(n=1)], busy={"n": 5.0}, now_s=5.0)) == 1


@pytest.mark.parametrize(
    ("nodes", "reason"), [([PoolNode(node="n", draining=True)], "its node is going"), ([], "its node is gone")]
)
def test_processes_of_a_node_that_goes_end(nodes: list[PoolNode], reason: str) -> None:
    assert decide(nodes=nodes, requests=[request(n=1)], processes=[process("p")]) == [End(name="p", reason=reason)]


def test_what_jobs_wanted_stays_until_the_idle_time() -> None:
    config = PoolConfig(idle_s=300.0)
    over = [dataclasses.replace(request(n=1), over=True)]
    assert decide(config, requests=over, processes=[process("p")], now_s=299.0) == []
    [end] = decide(config, requests=over, processes=[process("p")], now_s=301.0)
    assert isinstance(end, End) and end.reason.startswith("0 of its environment are wanted")


def test_a_surplus_process_ends_rather_one_only_starting() -> None:
    [end] = decide(requests=[request(n=1)], processes=[process("a", ready=False), process("b")])
    assert isinstance(end, End) and end.name == "a"


def test_the_last_used_environments_stay_after_running_jobs_own() -> None:
    config = PoolConfig(environments=2)
    ended = [dataclasses.replace(request(job=f"{n}", environment=f"e{n}", asked_s=n), over=True) for n in (1, 2, 3)]
    running = request(job="old", environment="e0", asked_s=99.0)
    assert [each.environment for each in remember(config, [*ended, running], 100.0)] == ["e0", "e3"]


def test_whole_pool_has_no_more_processes_than_its_total() -> None:
    nodes = [PoolNode(node=name) for name in ("n", "m", "o")]
    wish = [request(n=1, m=1, o=1)]
    assert len(decide(PoolConfig(total=2), nodes=nodes, requests=wish)) == 2
    others = [process("p", environment="old"), process("q", node="m", environment="old")]
    found = decide(PoolConfig(total=2), nodes=nodes, requests=wish, processes=others)
    assert [type(each) for each in found] == [End, End], "they have room once these have ended"
    one = decide(PoolConfig(total=3), nodes=nodes, requests=wish, processes=others)
    assert [type(each) for each in one].count(Start) == 1


def test_demand_counts_for_idle_time_after_it_was_asked() -> None:
    config = PoolConfig(idle_s=300.0)
    for now_s, kept in ((1000.0, True), (1300.0, True), (1300.5, False)):
        asked = dataclasses.replace(request(n=1, asked_s=1000.0), over=True)
        assert bool(remember(config, [asked], now_s)) == kept


def test_memory_bounds_a_node() -> None:
    node = PoolNode(node="n", memory_bytes=6400 * MIB)  # of whose tenth two processes of 300 MiB have room
    processes = [process("p")]
    assert len(decide(nodes=[node], requests=[request(n=4)], processes=processes)) == 1
    assert decide(nodes=[node], requests=[request(n=4)], processes=[*processes, process("q")]) == []
    [end] = decide(nodes=[node], requests=[request(n=4)], processes=[*processes, process("q"), process("r")])
    assert isinstance(end, End), "what has no room is not wanted"
    assert decide(nodes=[node], requests=[request(n=0)]) == []


@pytest.mark.parametrize(("mib", "starts"), [(5119, 0), (5120, 1)])
def test_a_process_of_unknown_size_counts_half_a_gib(mib: int, starts: int) -> None:
    node = PoolNode(node="n", memory_bytes=mib * MIB)
    assert len(decide(nodes=[node], requests=[request(n=1)])) == starts, "a tenth of the node's memory is the pool's"


def test_without_a_setting_the_pool_is_small() -> None:
    assert read_config({}) == PoolConfig(
        per_node=4, total=32, memory_share=0.1, environments=4, idle_s=300.0, quiet_s=20.0
    )
    assert not PoolConfig(total=0).on


def test_the_pool_is_set_by_one_variable() -> None:
    assert read_config({}) == PoolConfig() and PoolConfig().on
    assert not read_config({"ELASTIC_RAY_POOL": "off"}).on and not read_config({"ELASTIC_RAY_POOL": "0"}).on
    told = read_config({"ELASTIC_RAY_POOL": "per_node=2, total=16,memory_share=0.05"})
    assert told == PoolConfig(per_node=2, total=16, memory_share=0.05)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("many=2", "must be 'off' or set some of per_node, total"),
        ("per_node=two", "must give per_node a int, but got 'two'"),
        ("per_node=-1", "per_node of the pool must be a whole number, 0 or more, but got -1"),
        ("memory_share=2", "above 0 and at most 1, but got 2.0"),
        ("idle_s=0", "idle_s of the pool must be above 0 seconds and finite, but got 0.0"),
    ],
)
def test_a_wrong_setting_says_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_config({"ELASTIC_RAY_POOL": text})


# -- whatever happens ----------------------------------------------------------------------------------------

NODES = st.sampled_from(["n1", "n2", "n3"])
ENVIRONMENTS = st.sampled_from(["e1", "e2", "e3"])
CONFIGS = st.builds(
    PoolConfig,
    per_node=st.integers(0, 4),
    total=st.integers(0, 6),
    memory_share=st.sampled_from([0.05, 0.1, 1.0]),
    environments=st.integers(1, 3),
)
DEMANDS = st.lists(
    st.builds(
        ProcessRequest,
        job=st.sampled_from(["a", "b", "c"]),
        environment=ENVIRONMENTS,
        nodes=st.dictionaries(NODES, st.integers(0, 5), max_size=3),
        since_s=st.floats(0, 100),
        asked_s=st.floats(0, 500),
        over=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda each: each.job,
)
CLUSTERS = st.lists(
    st.builds(PoolNode, node=NODES, memory_bytes=st.sampled_from([None, 4e9, 16e9]), draining=st.booleans()),
    max_size=3,
    unique_by=lambda each: each.node,
)
PROCESSES = st.lists(
    st.builds(
        PooledProcess,
        name=st.uuids().map(str),
        node=NODES,
        environment=ENVIRONMENTS,
        ready=st.booleans(),
        memory_bytes=st.sampled_from([0, 300 * MIB, 900 * MIB]),
    ),
    max_size=8,
    unique_by=lambda each: each.name,
)


@given(CONFIGS, CLUSTERS, PROCESSES, DEMANDS, st.randoms(use_true_random=False))
def test_the_pool_comes_to_rest_within_its_bounds(config, nodes, processes, requests, random) -> None:  # type: ignore[no-untyped-def]
    """Carried out again and again, decisions end in a state in which nothing is decided any more."""
    now_s = 500.0
    for round_ in range(40):
        given_ = {"nodes": nodes, "requests": requests, "busy": {}, "now_s": now_s}
        told = plan(config, processes=processes, **given_)
        shuffled = {
            **given_,
            "nodes": random.sample(nodes, len(nodes)),
            "requests": random.sample(requests, len(requests)),
        }
        assert set(plan(config, processes=random.sample(processes, len(processes)), **shuffled)) == set(told)
        if not told:
            break
        ends = {each.name for each in told if isinstance(each, End)}
        assert ends <= {each.name for each in processes}
        starts = [each for each in told if isinstance(each, Start)]
        assert len({each.node for each in starts}) == len(starts)
        begun = [
            PooledProcess(name=f"{round_}.{index}", node=each.node, environment=each.environment, ready=False)
            for index, each in enumerate(starts)
        ]
        before = len(processes)
        processes = [
            dataclasses.replace(each, ready=True, memory_bytes=each.memory_bytes or 300 * MIB)
            for each in processes
            if each.name not in ends
        ] + begun
        if starts:
            assert max(len(processes), before) <= max(config.total, before)
    else:
        raise AssertionError("it never comes to rest")
    on_node = collections.Counter(each.node for each in processes)
    assert len(processes) <= config.total and all(count <= config.per_node for count in on_node.values())
    assert set(on_node) <= {node.node for node in nodes if not node.draining}
    assert len({each.environment for each in processes}) <= config.environments
    for node in nodes:
        memory = sum(each.memory_bytes for each in processes if each.node == node.node)
        assert node.memory_bytes is None or memory <= node.memory_bytes * config.memory_share
