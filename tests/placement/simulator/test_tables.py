"""True step times and gradient statistics, against the made-up truth they were written from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.simulator.workloads.profiles import Application, canonical, load_profiles
from tests.placement.simulator.worlds import profiles, step_s


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Application:
    return load_profiles(profiles(tmp_path_factory.mktemp("p")), ("t4",))["toy"]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 5))
def test_a_rotation_is_the_same_placement(counts: list[int], turn: int) -> None:
    turn %= len(counts)
    turned = counts[turn:] + counts[:turn]
    assert canonical(turned) == canonical(counts)
    assert sorted(canonical(counts)) == sorted(counts)
    assert canonical(counts)[0] == min(counts)


@settings(max_examples=50, deadline=None)
@given(local=st.floats(8, 64), counts=st.sampled_from([(1,), (3,), (2, 2), (4, 4)]))
def test_a_known_placement_is_linear_in_the_local_batch(
    toy: Application, local: float, counts: tuple[int, ...]
) -> None:
    got = toy.step_times["t4"].times(counts, local)
    assert got == pytest.approx(step_s(len(counts), sum(counts), local), rel=1e-9)


def test_an_unknown_placement_is_interpolated(toy: Application) -> None:
    # (4, 2) is 2 nodes and 6 replicas, between 22 and 44 of the table: the made-up truth does not depend on more.
    assert toy.step_times["t4"].times((4, 2), 16) == pytest.approx(step_s(2, 6, 16), rel=1e-9)


def test_outside_everything_measured_the_nearest_counts_answer(toy: Application) -> None:
    step, sync = toy.step_times["t4"].times((4,) * 9, 16)
    assert step == pytest.approx(step_s(4, 16, 16)[0], rel=1e-9)
    assert 0 < sync < step


def test_gradient_statistics_are_linear_between_profiled_batches(toy: Application) -> None:
    assert toy.noise(32, 1).sqr == pytest.approx(0.5)
    assert toy.noise(80, 0).var == pytest.approx(4.0)
    assert toy.noise(10_000, 0) == toy.noise(512, 0)
    # gain = (var + sqr) / (var / s + sqr) with var 4, sqr 1 and s = 4
    assert toy.gain(128, 0) == pytest.approx(5 / 2)


def test_progress_is_the_least_over_the_batches(toy: Application) -> None:
    assert [toy.progress_at(epoch) for epoch in range(toy.epochs + 1)] == [0, 1000, 2000, 3000, 4000]
    assert toy.iterations_at(32, 0) == 1000
    assert np.isclose(toy.iterations_at(80, 0), (1000 + 250) / 2)
