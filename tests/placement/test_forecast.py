"""Decisions about jobs whose coming batches are known: over the time for which they hold, and ahead of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.autoscaling.autoscaler import Autoscaler
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster
from placement.cluster.jobs import JobView, Progress
from placement.cluster.node_types import NodeType
from placement.errors import InputError
from placement.goodput.forecast import BatchForecast, NoiseTrend
from placement.goodput.speeds import GoodputCache, foreseen, grown, table
from placement.policies import make_policy
from placement.simulator import simulate
from placement.simulator.workloads.traces import TraceJob
from tests.placement.simulator.worlds import profiles
from tests.placement.views import view

WORKERS = np.array([[1, 2, 4, 8, 16]])
NODES = np.ones_like(WORKERS)


def rates(job: JobView) -> list[float]:
    found: list[float] = table([job], "", NODES, WORKERS, GoodputCache())[0].tolist()
    return found


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.floats(0, 7000))
def test_what_follows_is_a_function_of_samples(gaps: list[int], at: float) -> None:
    begins = list(itertools.accumulate(gaps))
    steps = tuple((float(begin), 64 + number) for number, begin in enumerate(begins))
    batch, left = BatchForecast(steps=steps).after(at)
    passed = [size for begin, size in steps if begin <= at]
    assert batch == (passed[-1] if passed else None)
    assert len(passed) + (len(left.steps) if left is not None else 0) == len(steps)
    if left is not None:
        assert left.steps[0] == (steps[len(passed)][0] - at, steps[len(passed)][1])


@pytest.mark.parametrize("steps", [(), ((0.0, 64),), ((5.0, 64), (5.0, 128)), ((5.0, 0),)])
def test_a_wrong_forecast_is_refused(steps: tuple[tuple[float, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"steps must be .*, but got"):
        BatchForecast(steps=steps)
    with pytest.raises(ValueError, match="forecast of job 'a' needs a held_batch"):
        view("a", forecast=BatchForecast(steps=((5.0, 64),)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([64, 128, 512]), st.floats(1.0, 1e7), st.sampled_from([128, 1024, 4096]))
def test_goodput_lies_between_those_of_both_batches(now: int, begin: float, later: int) -> None:
    here = view("a", held_batch=now)
    coming = dataclasses.replace(here, forecast=BatchForecast(steps=((begin, later),)))
    for mean, before, after in zip(
        rates(coming), rates(here), rates(dataclasses.replace(here, held_batch=later)), strict=True
    ):
        assert min(before, after) * (1 - 1e-9) <= mean <= max(before, after) * (1 + 1e-9)


def test_batches_far_ahead_change_nothing_and_near_ones_all() -> None:
    here = view("a", held_batch=64)
    far = dataclasses.replace(here, forecast=BatchForecast(steps=((1e9, 4096),)))
    near = dataclasses.replace(here, forecast=BatchForecast(steps=((1e-6, 2048), (1e-5, 4096))))
    assert rates(far) == pytest.approx(rates(here))
    assert rates(near) == pytest.approx(rates(dataclasses.replace(here, held_batch=4096)), rel=1e-5)


def test_goodput_is_the_mean_over_twenty_minutes() -> None:
    here = view("a", held_batch=64)
    speed, later = rates(here)[0], rates(dataclasses.replace(here, held_batch=4096))[0]
    half = dataclasses.replace(here, forecast=BatchForecast(steps=((600.0 * speed, 4096),)))
    assert rates(half)[0] == pytest.approx((speed + later) / 2) and speed != pytest.approx(later, rel=0.05)


def test_the_batch_in_a_minute_follows_from_samples() -> None:
    job = view("a", held_batch=64, allocation={"n0": 1}, forecast=BatchForecast(steps=((1000.0, 128), (9000.0, 256))))
    speed = rates(dataclasses.replace(job, forecast=None))[0]  # at the initial batch each sample counts in full
    assert foreseen(job, "", 999.0 / speed, GoodputCache()) == job
    later = foreseen(job, "", 1001.0 / speed, GoodputCache())
    assert later.held_batch == 128 and later.forecast == BatchForecast(steps=((8000.0, 256),))
    near = dataclasses.replace(job, forecast=BatchForecast(steps=((1000.0, 128), (1900.0, 256))))
    assert foreseen(near, "", 1001.0 / speed, GoodputCache()).held_batch == 128
    last = foreseen(job, "", 1e6, GoodputCache())
    assert last.held_batch == 256 and last.forecast is None
    waiting = dataclasses.replace(job, allocation={})
    assert foreseen(waiting, "", 1e6, GoodputCache()) == waiting


def test_nodes_are_asked_for_before_the_batch_needs_them() -> None:
    hour = 3600.0
    kind = NodeType(
        name="T4", resources={"CPU": 1.0}, labels={GPU_TYPE_LABEL: "T4"}, usd_per_h=1.0, max_nodes=16, startup_s=hour
    )
    there = Cluster(nodes=(kind.node("n0"), kind.node("n1")))
    told = Progress(done=1000.0, epoch_ends=(1000.0,), epochs=10_000.0)
    job = view(
        "a", max_workers=16, held_batch=64, allocation={"n0": 1, "n1": 1}, progress=told, atomic_bsz_range=(4, 512)
    )
    speed = float(table([job], "T4", NODES[:, :1] + 1, WORKERS[:, 1:2], GoodputCache())[0, 0])
    soon = dataclasses.replace(job, forecast=BatchForecast(steps=((0.9 * hour * speed, 4096),)))
    late = dataclasses.replace(job, forecast=BatchForecast(steps=((1e9, 4096),)))

    def asked(each: JobView) -> int:
        scaler = Autoscaler([kind], make_policy("goodput"), CostPerProgress(value_usd_per_h=3.0))
        return scaler.decide([each], there, 0.0).nodes["T4"]

    assert asked(late) == asked(job) < asked(soon)


def test_plain_jobs_are_decided_on_as_before() -> None:
    """A job without a forecast has the same numbers and places, whatever is known of those beside it."""
    jobs = [view(f"j{i}", submitted_s=float(i)) for i in range(3)]
    coming = view("z", held_batch=64, forecast=BatchForecast(steps=((1e3, 4096),)), submitted_s=9.0)
    cache, shape = GoodputCache(), (np.repeat(NODES, 4, axis=0), np.repeat(WORKERS, 4, axis=0))
    both = table([*jobs, coming], "", *shape, cache)
    assert both[:3].tolist() == table(jobs, "", shape[0][:3], shape[1][:3], GoodputCache()).tolist()


def test_plain_queues_are_placed_as_before(tmp_path: Path) -> None:
    toys = profiles(tmp_path)
    jobs = [TraceJob(name=f"j{i}", time_s=60.0 * i, application="toy", num_replicas=1, batch_size=32) for i in range(4)]
    told, untold = (simulate(jobs, toys, "t4:2x4", rules="live", foresight=known) for known in (True, False))
    assert told.placed == untold.placed and told.jobs == untold.jobs


def test_simulated_ramps_are_trained_and_told(tmp_path: Path) -> None:
    toys = profiles(tmp_path)
    job = TraceJob(name="a", time_s=0.0, application="toy", num_replicas=1, batch_size=32, ramp=((0.0, 32),))
    rising = dataclasses.replace(job, ramp=((0.0, 32), (0.6, 512)))
    small, both = (simulate([each], toys, "t4:1x1", rules="live").jobs[0] for each in (job, rising))
    # On one GPU 32 samples take 52 ms, and 512 in eight parts of 64 take 84 ms each.
    assert small.finish_s - small.start_s == pytest.approx(4000 * 0.052 * 1.2, rel=0.15)
    assert both.finish_s != pytest.approx(small.finish_s, rel=0.02)
    with pytest.raises(InputError, match="ramp of job 'a' must rise from part 0 to below 1"):
        dataclasses.replace(job, ramp=((0.1, 32),))


def trend(noise: Callable[[float], float], until_s: float = 1000.0) -> NoiseTrend:
    found, at_s = NoiseTrend(), 1.0
    while at_s <= until_s:
        found.see(at_s, noise(at_s))
        at_s += 1.0
    return found


@given(st.floats(-0.01, 0.02), st.floats(1e-3, 1e6), st.floats(0.0, 5000.0))
def test_steady_growth_continues_within_its_limits(slope: float, start: float, ahead_s: float) -> None:
    found = trend(lambda at_s: start * math.exp(slope * at_s)).growth(ahead_s)
    # The latest reading that is kept is that of second 996, a quarter of which is 249 s.
    expected = math.exp(min(slope * min(ahead_s, 249.0), math.log(2.0)))
    assert 1.0 <= found <= 2.0 and found <= max(1.0, expected) * (1 + 1e-6)
    assert found >= expected / 2 ** (1 / 4) * (1 - 1e-6) or (found == 1.0 and slope < 1e-9)


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=200), st.floats(0.0, 1e9))
def test_no_history_leads_out_of_the_limits(noises: list[float], ahead_s: float) -> None:
    found = trend(lambda at_s: noises[int(at_s) % len(noises)], 300.0).growth(ahead_s)
    assert 1.0 <= found <= 2.0


@pytest.mark.parametrize(
    "noise",
    [
        lambda at_s: 50.0,
        lambda at_s: 1e6 / at_s,
        lambda at_s: 10.0 if at_s < 900 else 100.0,  # one jump is no trend
        lambda at_s: math.nan,
        lambda at_s: -1.0,
    ],
    ids=["steady", "falls", "jumps", "unknown", "no signal"],
)
def test_what_does_not_grow_steadily_stays(noise: Callable[[float], float]) -> None:
    assert trend(noise).growth(1e6) == 1.0
    assert NoiseTrend().growth(1e6) == 1.0


def test_growing_noise_is_worth_more_workers() -> None:
    here, grows = view("a"), view("a", noise_growth=2.0)
    assert here.goodput is not None
    later = rates(grown(grows, 2.0))
    assert rates(grows) == pytest.approx([(a + b) / 2 for a, b in zip(rates(here), later, strict=True)])
    shares = [b / a for a, b in zip(rates(here), rates(grows), strict=True)]
    assert shares == sorted(shares) and shares[-1] > 1.0, "large sizes gain most"
    held = view("a", held_batch=64)
    assert rates(dataclasses.replace(held, noise_growth=2.0)) == rates(held), "a held batch is forecast by its ramp"
    ahead = foreseen(grows, "", 300.0, GoodputCache())
    assert ahead.goodput is not None
    assert ahead.goodput.noise.var == pytest.approx(2**0.25 * here.goodput.noise.var) and ahead.noise_growth == 1.0
    with pytest.raises(ValueError, match="noise_growth of job 'a'"):
        view("a", noise_growth=0.5)


def test_noise_before_the_first_step_is_no_history() -> None:
    trends = [NoiseTrend(), NoiseTrend()]
    trends[0].see(0.0, 5.0)
    for trend in trends:
        for number in range(1, 200):
            trend.see(10.0 * number, 2.0 ** (number / 100))
    assert trends[0].growth(600.0) == trends[1].growth(600.0) > 1.0
