"""Whole jobs under random targets, deaths, hangs and out-of-memory errors, with messages out of order.

What must hold at every event is asserted in the simulation itself; see ``simulated_job`` and ``driver.Ledger``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ray.events import EventKind
from placement.cluster.sizes import ANY_SIZE, AllowedSizes, MemoryNeed
from tests.membership.simulated_job import Rules, SimJob

NODES = {"n1": 3, "n2": 2, "n3": 2}
# Long enough for: a hung joiner in two attempts to form a group, a dead node's reservation, a restart, a move.
RECOVERY_S = 90.0


def random_target(chance: random.Random, nodes: dict[str, int], least: int = 1) -> dict[str, int]:
    """Some workers on some nodes, at least one, or ``least``, where there is room for so many."""
    target = {node: chance.randint(0, fit) for node, fit in nodes.items()}
    if sum(target.values()) < min(least, sum(nodes.values())):
        return dict(nodes)
    return {node: count for node, count in target.items() if count} or {next(iter(nodes)): 1}


def disturb(job: SimJob, chance: random.Random, extra: Sequence[str] = (), least: int = 1) -> None:
    """One random mishap or wish."""
    living = job.living()
    victim = chance.choice(living) if living else None
    match chance.choice(["target", "target", "kill", "kill", "two", "hang", "memory", "node", *extra]):
        case "target":
            job.target(random_target(chance, NODES, least))
        case "kill" if victim is not None:
            job.kill(victim.name)
        case "two":
            for worker in chance.sample(living, min(2, len(living))):
                job.kill(worker.name)
        case "hang" if victim is not None:
            victim.hang()
        case "memory" if victim is not None:
            victim.run_out_of_memory()
        case "node" if len(job.dead_nodes) < len(NODES) - 1 and chance.random() < 0.3:
            job.kill_node(chance.choice(sorted(NODES.keys() - job.dead_nodes)))
        case "controller":
            job.lose_controller()


def live(
    seed: int,
    mishaps: int,
    *,
    min_workers: int = 1,
    sizes: AllowedSizes = ANY_SIZE,
    rules: Rules = Rules(),
    extra: Sequence[str] = (),
) -> SimJob:
    """A job's life: a start, mishaps, then peace, in which it must reach its target and finish."""
    chance = random.Random(seed)
    job = SimJob(seed, NODES, min_workers=min_workers, sizes=sizes, rules=rules)
    job.target(random_target(chance, NODES, sizes.fitting))
    for _ in range(mishaps):
        job.run_for(chance.choice([0.05, 0.3, 1.0, 4.0]))
        disturb(job, chance, extra, sizes.fitting)
    target = random_target(chance, {n: fit for n, fit in NODES.items() if n not in job.dead_nodes}, sizes.fitting)
    job.target(target)
    deadline_s = job.now_s + RECOVERY_S
    while not settled(job, target):
        held = Counter(w.node for w in job.machine.workers.values())
        assert job.now_s < deadline_s, f"holds {held} of {target}; {job.machine.in_flight}"
        job.run_for(1.0)
    before = job.safe_ticks
    job.run_for(3.0)
    assert job.safe_ticks != before, "it trains"
    job.last_epoch = max(w.state.epoch for w in job.living())
    job.run_for(20.0)
    assert job.done, "it finishes"
    assert job.check_samples() > job.last_epoch
    return job


def settled(job: SimJob, target: dict[str, int]) -> bool:
    """Whether the job has the size it is to have, and everybody lives."""
    machine = job.machine
    reached = Counter(w.node for w in machine.workers.values()) == target and machine.world_size == sum(target.values())
    return (
        not job.away
        and reached
        and machine.in_flight is None
        and all(w.worker in job.holding() for w in machine.members())
    )


@pytest.mark.thorough
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), mishaps=st.integers(0, 14), min_workers=st.integers(1, 3))
def test_a_job_lives_through_any_mishaps(seed: int, mishaps: int, min_workers: int) -> None:
    live(seed, mishaps, min_workers=min_workers)


@pytest.mark.thorough
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), mishaps=st.integers(1, 14), min_workers=st.integers(1, 3))
def test_a_job_lives_through_the_loss_of_its_controller(seed: int, mishaps: int, min_workers: int) -> None:
    live(seed, mishaps, min_workers=min_workers, extra=["controller"] * 4)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), mishaps=st.integers(0, 14), least=st.integers(2, 6))
def test_so_does_one_that_fits_from_some_size_on(seed: int, mishaps: int, least: int) -> None:
    """Where too few nodes are left for its memory, it trains with the workers that there are."""
    need = MemoryNeed(available_bytes=60 // least, sharded_bytes=60, copies=1)
    sizes = AllowedSizes(memory=need)
    assert sizes.fitting == least
    live(seed, mishaps, min_workers=least, sizes=sizes, extra=["target", "controller"])


def test_losing_only_the_controller_costs_nothing() -> None:
    """Whatever it was doing: no step is lost, no worker is given up, and nothing but its own plans is called off."""
    for seed in range(60):
        job = SimJob(seed, NODES)
        job.target({"n1": 2})
        job.run_for(4.0 + seed / 50)
        job.target({"n1": 3, "n2": 1})
        job.run_for(job.random.uniform(0.0, 4.0))
        ticks, members = job.safe_ticks, {w.worker for w in job.machine.members()}
        job.lose_controller()
        job.run_for(30.0)
        assert job.returns == 1 and job.restarts == 0
        assert job.safe_ticks > ticks
        assert members <= {w.worker for w in job.machine.members()}
        assert settled(job, {"n1": 3, "n2": 1})
        assert EventKind.RESTART not in {note.kind for note in job.notes}


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    mishaps=st.integers(4, 14),
    min_workers=st.integers(1, 3),
    unreadable=st.booleans(),
)
def test_a_job_with_automatic_checkpoints_lives_through_them(
    seed: int, mishaps: int, min_workers: int, unreadable: bool
) -> None:
    live(seed, mishaps, min_workers=min_workers, rules=Rules(automatic=3, unreadable=unreadable))


def test_without_mishaps_nothing_is_forced() -> None:
    for seed in range(10):
        job = live(seed, 0)
        assert job.restarts == 0
        assert {note.kind for note in job.notes} <= {EventKind.STARTED, EventKind.RESIZE}
