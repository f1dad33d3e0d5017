"""What is asked for in units, checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import ray.train
import torch

import elastic_ray as er
from elastic_ray.parallel.refusals import refuse_in_unit
from elastic_ray.unit import Unit, place_in, process_names, worker_of
from elastic_ray.worker_group.failure_detector import FailureDetector


def trainer(workers: Any, unit: Any, **options: Any) -> er.ElasticTrainer:
    return er.ElasticTrainer(
        print,
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 2}),
        scheduling_config=er.SchedulingConfig(unit=unit),
        **options,
    )


def test_sizes_and_bundle_are_of_units() -> None:
    spec = trainer((4, 12), Unit(tp=2, shard=2)).spec()
    assert (spec.min_workers, spec.max_workers, spec.bundle) == (1, 3, {"CPU": 8.0})
    assert trainer(3, 1).spec().bundle == {"CPU": 2.0}


def test_workers_that_make_no_whole_units_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiples of the 2 workers of a unit.*got \(3, 5\); for example \(2, 4\)"):
        trainer((3, 5), 2)


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: Unit(), ValueError, "must have a dimension"),
        (lambda: Unit(rows=2), ValueError, "got 'rows'"),
        (lambda: Unit(tp=0), ValueError, "1 or more, but got 0"),
        (lambda: Unit(tp=True), TypeError, "got True"),
        (lambda: er.SchedulingConfig(unit=0), ValueError, "unit must be a whole number of workers, 1 or more"),
        (lambda: er.SchedulingConfig(unit="2"), TypeError, "unit must be a whole number"),
        (lambda: er.SchedulingConfig(unit=2, mixed_gpu_types=True), ValueError, "mixed_gpu_types is not supported"),
    ],
)
def test_units_that_cannot_be_are_refused(make: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make()


def test_what_a_model_cannot_have_in_units_is_named() -> None:
    refuse_in_unit(torch.nn.Linear(1, 1))
    sharded = torch.nn.Sequential(torch.nn.Linear(4, 4))
    er.fully_shard(sharded)
    with pytest.raises(ValueError, match=r"0.weight is sharded by elastic_ray.fully_shard.*unit_mesh"):
        refuse_in_unit(sharded)


def test_workers_along_shard_read_their_own_part() -> None:
    places = [place_in(Unit(shard=2, tp=2), position, "/tmp/x/unit") for position in range(4)]
    assert [each.shard for each in places] == [0, 0, 1, 1] and {each.shards for each in places} == {2}
    places = [place_in(Unit(tp=2, shard=2), position, "/tmp/x/unit") for position in range(4)]
    assert [each.shard for each in places] == [0, 1, 0, 1]
    assert place_in(4, 3, "/tmp/x/unit").shards == 1


def test_a_unit_alone_has_as_long_as_one_worker() -> None:
    names = process_names("w3", 2)
    assert names == ("w3", "w3.1") and worker_of("w3.1") == "w3"
    detector = FailureDetector(1.0, alone_s=15.0)
    detector.silent(0.0, names)
    detector.heard(*names, "w4")
    for now_s in range(1, 6):
        assert detector.silent(float(now_s), names) == []
    assert {each for each, _ in detector.silent(6.0, [*names, "w4"])} == {*names, "w4"}


def test_the_mesh_of_no_unit_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"unit_mesh\(\) is for jobs of units"):
        er.unit_mesh()
