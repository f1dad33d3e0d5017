"""Losses of branches at equal samples, and the batch up to which samples are worth as much."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.adaptation import Pause, PolicyView, SetBatch
from elastic_ray.adaptation.policies.branch_batch import BranchBatch
from elastic_ray.batch.branch_losses import BranchError, BranchPlan, Curve, compare
from elastic_ray.batch.limits import BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo

PLAN = BranchPlan()


def curve(size: int, samples: int, factor: float, noise: float = 0.0, seed: int = 0) -> Curve:
    """A loss that falls with the samples, reported in each step; its noise is that of the samples, so shared."""
    draw = random.Random(seed)
    return [(at, factor * (3.0 - at / samples + draw.gauss(0.0, noise))) for at in range(size, samples + 1, size)]


@given(st.integers(1, 64), st.integers(16, 400), st.lists(st.floats(0.9, 1.5), min_size=2, max_size=2))
def test_the_largest_batch_without_loss_is_found(batch: int, steps: int, worse: list[float]) -> None:
    samples = 4 * batch * steps
    sizes = [batch, 2 * batch, 4 * batch]
    curves = {size: curve(size, samples, by) for size, by in zip(sizes, [1.0, *worse], strict=True)}
    found = compare(PLAN, 100, samples, curves)
    lost = [each.worse for each in found.losses]
    assert lost[0] == 0 and [each.batch_size for each in found.losses] == sizes
    for each, by in zip(found.losses[1:], worse, strict=True):
        # A coarser curve has its points a little later in each part.
        assert each.worse == pytest.approx(by - 1, abs=by * 4 * batch / samples)
    within = [size for size, by in zip(sizes, lost, strict=True) if by <= PLAN.tolerance]
    fine = next((at for at, by in enumerate(lost) if by > PLAN.tolerance), len(sizes))
    if found.critical_batch is not None:
        assert found.critical_batch in within and found.critical_batch <= sizes[fine - 1]
    assert str(found).count("\n") == 4


def test_noise_that_hides_the_difference_is_told() -> None:
    samples = 64 * 100
    curves = {size: curve(size, samples, 1.0, noise=0.5, seed=size) for size in (16, 32)}
    found = compare(PLAN, 1, samples, curves)
    assert found.losses[1].error > PLAN.tolerance
    assert found.critical_batch is None and "within their error" in str(found)
    same = {size: curve(size, samples, 1.0) for size in (16, 32)}
    assert compare(PLAN, 1, samples, same).critical_batch == 32


def test_too_few_reports_are_refused() -> None:
    curves = {16: curve(16, 1600, 1.0), 64: [(800.0, 2.0), (1600.0, 1.0)]}
    with pytest.raises(BranchError, match="must report 'loss' 4 times or more within 800 samples, but at batch 64 it"):
        compare(PLAN, 1, 1600, curves)
    with pytest.raises(BranchError, match="at batch 16 it did 0 times"):
        compare(PLAN, 1, 1600, {16: [], 64: curves[16]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factors", ()),
        ("factors", (1, 2)),
        ("factors", (4, 2)),
        ("factors", (2.0,)),
        ("steps", 3),
        ("steps", 15),
        ("steps", True),
        ("metric", ""),
        ("tolerance", 0),
        ("tolerance", math.nan),
    ],
)
def test_plans_name_the_wrong_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .* but got"):
        BranchPlan(**{field: value})


def test_batches_above_the_loaders_largest_are_left_out() -> None:
    assert PLAN.sizes(64, 1000) == (64, 128, 256)
    assert PLAN.sizes(64, 128) == (64, 128)
    with pytest.raises(
        BranchError, match="no batch of 2 or 4 times the present 64 is within the loader's largest, 100"
    ):
        PLAN.sizes(64, 100)


def test_a_branch_pauses_once_after_its_samples() -> None:
    policy = BranchBatch(128, 1000)
    assert policy.before_step(PolicyView(samples=5000, batch_size=32)) == SetBatch(128)
    assert policy.before_step(PolicyView(samples=5999, batch_size=129)) is None
    assert isinstance(policy.before_step(PolicyView(samples=6000, batch_size=129)), Pause)
    assert policy.before_step(PolicyView(samples=6129, batch_size=129)) is None


def test_a_branch_at_another_batch_ends_with_the_reason() -> None:
    policy = BranchBatch(128, 10_000)
    for samples in range(5):
        policy.before_step(PolicyView(samples=samples, batch_size=32))
    with pytest.raises(ValueError, match="at batch 128 trains at 32 on 1 worker: raise local_bsz_bounds"):
        policy.before_step(PolicyView(samples=9, batch_size=32))


def test_the_planner_stays_below_the_critical_batch() -> None:
    planner = BatchPlanner()
    planner.set_critical_batch(128)  # before a worker is ready, as after a restart of the controller
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=32, max_batch_size=1024)))
    assert planner.loader is not None and planner.tuner is not None and planner.unbound_limits is not None
    assert planner.loader.limits.max_batch_size == planner.tuner.limits.max_batch_size == 128
    planner.set_critical_batch(4096)
    assert planner.loader.limits.max_batch_size == planner.unbound_limits.max_batch_size == 1024
    planner.set_critical_batch(8)
    assert planner.tuner.limits.max_batch_size == 32, "never below the batch that the user began with"
