"""Groups on GPUs of several types: shares follow the types' speeds, and a slow type is no straggler."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_ray.batch.limits import BatchLimits
from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.stragglers.detection import Response
from tests.stragglers.group import Times, TypedGroup


@pytest.mark.parametrize("response", ["tell", "share", "replace"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("types", [["a", "a", "b"], ["a", "b"], ["a", "b", "b", "b"]])
def test_shares_follow_types_speeds_and_nobody_is_a_straggler(
    types: list[str], noise: float, response: Response
) -> None:
    group = TypedGroup(types, {"a": 1.0, "b": 3.0}, Times(noise=noise), response)
    group.run(300)
    assert group.told == []
    rate = 240 / group.last_s
    ideal = sum(100.0 if gpu == "a" else 100.0 / 3 for gpu in types)
    assert rate >= (0.95 if noise == 0 else 0.7) * ideal
    by_type = dict(zip(types, group.sizes, strict=True))
    assert by_type["a"] == pytest.approx(3 * by_type["b"], rel=0.2)


def test_slow_worker_of_a_slow_type_is_still_found() -> None:
    group = TypedGroup(["a", "a", "b", "b", "b"], {"a": 1.0, "b": 3.0})
    group.run(60)
    group.worker_slow["w4"] = 3.0
    group.run(60)
    assert len(group.told) == 1
    assert group.told[0].startswith("worker w4 takes ")


def test_slow_worker_takes_its_types_share_of_a_share() -> None:
    group = TypedGroup(["a", "a", "a", "b", "b", "b"], {"a": 1.0, "b": 2.0}, response="share")
    group.worker_slow["w5"] = 2.0
    group.run(300, batch=440)
    # Speeds 100, 100, 100, 50, 50, 25: together 425.
    assert 440 / group.last_s >= 0.9 * 425
    assert group.sizes[5] == pytest.approx(group.sizes[4] / 2, rel=0.2)


def test_before_measurements_shares_are_those_of_the_model() -> None:
    group = TypedGroup(["a", "b"], {"a": 1.0, "b": 3.0})
    assert group.types.weights(None) is None
    group.members = [dataclasses.replace(m, speed={"a": 90.0, "b": 30.0}[m.gpu_type]) for m in group.members]
    weights = group.types.weights(None)
    assert weights is not None and weights == pytest.approx((1.0, 1 / 3))


def test_one_type_changes_nothing() -> None:
    group = TypedGroup(["a", "a", "a"], {"a": 1.0})
    group.run(50)
    assert group.types.weights(None) is None
    assert group.types.weights((1.0, 0.5, 1.0)) == (1.0, 0.5, 1.0)
    assert group.types.changes == 0 and group.types.take() == ()
    assert group.types.comparable_measures() is group.measured


def test_after_out_of_memory_shares_equal_times_comparable() -> None:
    group = TypedGroup(["a", "b"], {"a": 1.0, "b": 3.0})
    group.run(100)
    assert group.types.weights(None) is not None
    group.equal = True
    changes = group.types.changes
    group.run(100)
    assert group.types.weights(None) is None and group.types.changes == changes
    assert group.types.comparable([[4], [4]]) == [[4.0], [4.0]]


def test_a_joiner_takes_over_what_is_known() -> None:
    group = TypedGroup(["a", "b"], {"a": 1.0, "b": 3.0})
    group.run(100)
    newcomer = TypedGroup(["a", "b", "b"], {"a": 1.0, "b": 3.0})
    newcomer.types.restore(group.types.capture())
    weights = newcomer.types.weights(None)
    assert weights is not None and weights == pytest.approx((1.0, 1 / 3, 1 / 3), rel=0.1)


def test_what_each_type_took_is_reported_once() -> None:
    group = TypedGroup(["a", "a", "b"], {"a": 1.0, "b": 3.0})
    group.run(100)
    fast, slow = group.types.take()
    assert (fast.gpu, fast.workers, slow.gpu, slow.workers) == ("a", 2, "b", 1)
    assert fast.grad_time / fast.atomic_bsz == pytest.approx(0.01, rel=1e-6)
    assert slow.grad_time / slow.atomic_bsz == pytest.approx(0.03, rel=1e-6)
    assert group.types.take() == ()


@pytest.mark.parametrize(("batch", "workers", "fits"), [(8, 1, True), (7, 1, False), (16, 4, True), (15, 4, False)])
def test_batch_that_is_too_small_for_shares_is_refused(batch: int, workers: int, fits: bool) -> None:
    loader = LoaderInfo(limits=BatchLimits(init_batch_size=batch))
    if fits:
        loader.check_shares(workers)
        return
    with pytest.raises(ValueError, match=rf"mixed_gpu_types=True needs a batch of .* largest batch has {batch}"):
        loader.check_shares(workers)
