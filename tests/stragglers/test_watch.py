"""Stragglers of a simulated group: found soon and never falsely, relieved to the fastest step, replaced in the end."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from elastic_ray.stragglers.detection import SpeedTrace, StragglerConfig
from tests.stragglers.group import Group, Place, sequence_noise

TELL, SHARE = StragglerConfig(response="tell"), StragglerConfig(response="share")
REPLACE = StragglerConfig(response="replace", patience_s=30.0)
QUICK = settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
WARM = 40  # steps of a group at rest


@given(
    world=st.integers(2, 16),
    which=st.integers(0, 15),
    fixed_s=st.floats(0.0, 0.2),
    spread=st.floats(0.0, 0.25),
    seed=st.integers(0, 1000),
)
@QUICK
def test_a_worker_becoming_three_times_slower_is_found(
    world: int, which: int, fixed_s: float, spread: float, seed: int
) -> None:
    noise = sequence_noise(random.Random(seed), spread)
    group = Group(nodes=("n",) * world, batch=16 * world, fixed_s=fixed_s, noise=noise)
    group.step(WARM)
    assert not group.told
    group.slow = {group.members[which % world].worker: 3.0}
    group.step(20)
    assert group.states == ["slow"] and group.told[0]["worker"] in group.slow
    assert 1.8 < group.told[0]["ratio"] < 5.0


def test_a_worker_slow_from_the_beginning_is_found_soon() -> None:
    group = Group()
    group.slow = {"w3": 3.0}
    group.step(20)
    assert group.states == ["slow"] and group.told[0]["ratio"] == pytest.approx(3.0, rel=0.01)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("world", (2, 3, 4, 8))
@pytest.mark.parametrize("spread", (0.05, 0.3, 0.6))
def test_noise_alone_is_no_straggler(world: int, spread: float) -> None:
    """Six thousand steps of batches with sequences of any length, and pauses of single steps."""
    generator = random.Random(world)
    length = sequence_noise(generator, spread)

    def noise() -> float:
        return length() * (30 if generator.random() < 0.002 else 1)

    group = Group(nodes=("n",) * world, batch=8 * world, noise=noise)
    group.step(6000)
    assert not group.told


@example(batches=[7] * 10, fixed_s=0.3)  # sizes 2, 2, 2, 1: all take nearly as long, and the last has half the work
@example(batches=[5] * 10, fixed_s=0.0)  # sizes 2, 1, 1, 1: the first takes twice as long
@given(batches=st.lists(st.integers(4, 400), min_size=1, max_size=30), fixed_s=st.floats(0.0, 0.3))
@QUICK
def test_batches_that_change_are_no_stragglers(batches: list[int], fixed_s: float) -> None:
    """Also small ones, of which some ranks take twice as much as others."""
    group = Group(fixed_s=fixed_s)
    for batch in batches * 3:
        group.batch = batch
        group.step(7)
    assert not group.told


def test_pauses_of_a_few_steps_are_no_stragglers() -> None:
    group = Group()
    for _ in range(20):
        group.step(30)
        group.slow = {"w1": 20.0}  # it writes a checkpoint
        group.step(4)
        group.slow = {}
    assert not group.told


def test_a_moment_of_short_steps_is_no_straggler() -> None:
    """A core that others take for a second is fifty steps of 12 ms."""
    group = Group(batch=64, sample_s=0.012 / 16)
    for _ in range(30):
        group.step(500)
        group.slow = {"w1": 2.0}
        group.step(45)
        group.slow = {}
    assert not group.told
    group.slow, seconds = {"w3": 3.0}, 0.0
    while not group.told:
        seconds += group.step()
        assert seconds < 5.0
    assert group.told[0]["worker"] == "w3"


def test_one_that_is_only_a_little_slower_is_none() -> None:
    group = Group()
    group.slow = {"w2": 1.2}
    group.step(2000)
    assert not group.told


def test_one_that_keeps_up_again_is_told_with_hysteresis() -> None:
    group = Group()
    group.slow = {"w2": 2.0}
    group.step(30)
    group.slow = {"w2": 1.2}  # between the two thresholds
    group.step(500)
    assert group.states == ["slow"] and group.watch.slow
    group.slow = {}
    group.step(60)
    assert group.states == ["slow", "recovered"] and not group.watch.slow


def test_cause_is_told_as_far_as_it_is_known() -> None:
    alone = Group(nodes=("a", "a", "b", "b"))
    alone.slow = {"w3": 3.0}
    alone.step(20)
    assert [each["cause"] for each in alone.told] == ["worker"]
    node = Group(nodes=("a", "a", "a", "b", "b"))
    node.slow = {"w4": 3.0, "w5": 3.0}
    node.step(20)
    assert [(each["worker"], each["cause"]) for each in node.told] == [("w4", "node"), ("w5", "node")]
    data = Group()
    data.data_s = {"w1": 0.5}
    data.step(20)
    assert [(each["worker"], each["cause"]) for each in data.told] == [("w1", "data")]


@given(
    world=st.integers(2, 8),
    ratio=st.floats(1.5, 8.0),
    fixed=st.floats(0.0, 0.5),
    spread=st.floats(0.0, 0.1),
    seed=st.integers(0, 100),
)
@QUICK
def test_shares_come_near_the_shortest_step(world: int, ratio: float, fixed: float, spread: float, seed: int) -> None:
    """Within a tenth (and the noise) of the best cut of all, whatever part of the step does not shrink."""
    work = 64 * 0.01
    quiet = Group(SHARE, nodes=("n",) * world, batch=64 * world, fixed_s=fixed * work, sample_s=(1 - fixed) * 0.01)
    quiet.noise = sequence_noise(random.Random(seed), spread)
    quiet.step(WARM)
    quiet.slow = {"w1": ratio}
    quiet.step(400)
    quiet.noise = lambda: 1.0
    best = min(
        max(
            ratio * (quiet.fixed_s + quiet.sample_s * least),
            quiet.fixed_s + quiet.sample_s * -(-(quiet.batch - least) // (world - 1)),
        )
        for least in range(2, quiet.batch // 2)
    )
    assert quiet.step() <= best * (1.12 + 2 * spread) + ratio * quiet.sample_s
    assert sum(quiet.sizes()) == quiet.batch


def test_shares_settle_and_go_back_to_equal_ones() -> None:
    group = Group(SHARE, batch=100)
    group.step(WARM)
    group.slow = {"w4": 3.0}
    group.step(100)
    assert group.states == ["slow", "shares"] and group.sizes() == [30, 30, 30, 10]
    changes = group.watch.changes
    group.step(1000)
    assert group.watch.changes == changes, "shares that fit are not moved"
    group.slow = {}
    group.step(60)
    assert group.states == ["slow", "shares", "recovered"]
    assert group.watch.weights is None and group.sizes() == [25] * 4


def test_a_worker_slow_now_and_then_is_not_followed() -> None:
    """Each change of shares has a loader fetch anew: at most one in some hundred steps, once it is known to waver."""
    group = Group(SHARE, batch=100)
    for _ in range(60):
        group.slow = {"w4": 3.0}
        group.step(25)
        group.slow = {"w4": 1.7}
        group.step(25)
    first = group.watch.changes
    for _ in range(60):
        group.slow = {"w4": 3.0}
        group.step(25)
        group.slow = {"w4": 1.7}
        group.step(25)
    assert group.watch.changes - first <= 20


def test_one_that_stays_slow_is_replaced_despite_smaller_shares() -> None:
    group = Group(REPLACE)
    group.slow = {"w4": 3.0}
    while not group.watch.slow:
        group.step()
    begun = group.steps
    while not group.watch.slow[0].replace:
        group.step()
        assert group.steps - begun < 400
    waited_s = group.watch.slow[0].slow_s
    assert 30.0 <= waited_s < 31.0 and group.watch.slow[0].ratio == pytest.approx(3.0, rel=0.1)
    group.members = [*group.members[:3], Place("w5", "n")]
    group.slow = {}
    group.step(20)
    assert not group.watch.slow and group.watch.weights is None


def test_one_that_is_only_half_slow_is_not_replaced() -> None:
    group = Group(REPLACE)
    group.slow = {"w4": 1.35}
    group.step(2000)
    assert group.states == ["slow", "shares"] and not group.watch.slow[0].replace


def test_a_captured_watch_goes_on_alike() -> None:
    """A joiner, or a job that continues from a checkpoint, decides as the others do."""
    group, other = Group(REPLACE), Group(REPLACE)
    group.slow = {"w2": 4.0}
    for _ in range(80):
        group.step()
        before = other.watch.changes
        other.watch.restore(group.watch.capture())
        assert other.watch.capture() == group.watch.capture() and other.watch.changes > before
        assert other.watch.weights == group.watch.weights


def test_what_is_ignored_is_not_measured() -> None:
    group = Group(StragglerConfig())
    group.slow = {"w1": 9.0}
    group.step(100)
    assert not group.told and not group.watch.slow


def test_bad_settings_say_what_would_be_right() -> None:
    with pytest.raises(ValueError, match="stragglers must be one of ignore, tell, share, replace, but got 'kill'"):
        StragglerConfig(response="kill")
    with pytest.raises(ValueError, match="patience_s must be above 0 seconds and finite, but got 0"):
        StragglerConfig(patience_s=0)


def test_steps_without_work_for_a_rank_do_not_count() -> None:
    trace = SpeedTrace()
    assert trace.add(work=[4, 0], busy_s=[1.0, 1.0], data_s=[0.0, 0.0], among=[0, 1]) is trace


def test_shares_that_did_not_fit_are_withdrawn_for_good() -> None:
    group = Group(SHARE)
    group.slow = {"w2": 3.0}
    group.step(40)
    assert group.watch.uneven
    group.equal = True
    assert group.watch.weights is None and set(group.sizes()) == {16}
    group.step(1)
    group.equal = False  # ranks keep it, whatever a controller has forgotten
    changes = group.watch.changes
    group.step(200)
    assert set(group.sizes()) == {16} and group.watch.changes == changes
    assert [each.worker for each in group.watch.slow] == ["w2"] and group.watch.slow[0].ratio == pytest.approx(3.0)
    group.slow = {}
    group.step(100)
    assert group.states == ["slow", "shares", "recovered"]
