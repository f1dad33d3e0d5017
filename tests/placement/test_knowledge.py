"""What jobs of one fingerprint learn from each other, and when it is forgotten."""

from __future__ import annotations

import dataclasses

import pytest

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged
from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster
from placement.cluster.progress import Progress
from placement.goodput.fitting import Observation
from placement.goodput.remaining import remaining
from placement.knowledge.knowledge import Knowledge, KnowledgeConfig
from placement.policies import GoodputPolicy
from tests.placement.measured import MODEL, fresh, measured
from tests.placement.views import AT_ONCE, cluster, node


def test_a_newcomer_knows_what_others_measured_and_need_not_explore() -> None:
    knowledge = Knowledge()
    knowledge.learn(measured("old", (1, 2, 4)), 0.0)
    told = knowledge.complete(fresh(), 1.0)
    assert told.goodput is not None and {o.replicas for o in told.observations["T4"]} == {1, 2, 4}
    assert (told.growth_limit, told.most_workers) == (8, 4)
    assert told.goodput.step_time(1, 4, 64, 0) == pytest.approx(MODEL.step_time(1, 4, 64, 0), rel=0.1)


def test_every_new_shape_corrects_the_model() -> None:
    """A model fitted before the cliff at the node's edge was seen would keep GPUs idle, or jobs slow, for hours."""
    knowledge = Knowledge()
    first = measured("old", (1, 2, 3, 4))
    knowledge.learn(first, 0.0)
    cliff = 20 * float(MODEL.step_time(1, 4, 64, 0))
    before = knowledge.complete(fresh(), 1.0).goodput
    assert before is not None and before.step_time(2, 8, 64, 0) < cliff / 4
    beyond = (*first.observations["T4"], Observation(2, 8, 64, 0, cliff))
    knowledge.learn(dataclasses.replace(first, observations={"T4": beyond}), 2.0)
    after = knowledge.complete(fresh(), 3.0).goodput
    assert after is not None and after.step_time(2, 8, 64, 0) == pytest.approx(cliff, rel=0.1)


def test_other_models_and_jobs_without_fingerprint_learn_nothing() -> None:
    knowledge = Knowledge()
    knowledge.learn(measured("old", (1, 2, 4)), 0.0)
    knowledge.learn(measured("anonymous", (8,), fingerprint=None), 0.0)
    for stranger in (fresh("bert"), fresh(None)):
        assert knowledge.complete(stranger, 1.0) is stranger


def test_it_outlives_the_job_but_not_its_time() -> None:
    knowledge = Knowledge(KnowledgeConfig(forget_s=100.0))
    knowledge.learn(measured("old", (1, 2)), 0.0)
    knowledge.ended("old", 0.0)
    assert knowledge.complete(fresh(), 99.0).goodput is not None
    assert knowledge.complete(fresh(), 101.0).goodput is None


def test_a_changed_machine_is_measured_anew() -> None:
    knowledge = Knowledge()
    labels = {GPU_TYPE_LABEL: "T4"}
    knowledge.machines(Cluster(nodes=(node("n0", 4, labels=labels),)))
    knowledge.learn(measured("old", (1, 2)), 0.0)
    knowledge.machines(Cluster(nodes=(node("n0", 4, free=1, labels=labels),)))
    assert knowledge.complete(fresh(), 1.0).goodput is not None  # others' use is no other machine
    knowledge.machines(Cluster(nodes=(node("n0", 8, labels=labels),)))
    assert knowledge.complete(fresh(), 1.0).goodput is None


def test_the_newest_measurement_of_a_shape_counts() -> None:
    knowledge = Knowledge()
    slow = Observation(1, 2, 64, 0, 9.0)
    knowledge.learn(measured("old", (1, 2)), 0.0)
    knowledge.learn(dataclasses.replace(measured("later", (1, 2)), observations={"T4": (slow,)}), 1.0)
    assert slow in knowledge.complete(fresh(), 2.0).observations["T4"]


def test_the_core_lets_a_newcomer_start_where_others_have_been() -> None:
    def first_size(knowledge: Knowledge | None) -> int:
        core = AllocatorCore(GoodputPolicy(), AT_ONCE, knowledge=knowledge)
        core.handle(NodesChanged(cluster=cluster(8, 8)), 0.0)
        core.handle(JobHeartbeat(view=measured("old", (1, 2, 4))), 1.0)
        core.handle(JobHeartbeat(view=fresh()), 2.0)
        return sum(core.snapshot().jobs["new"].target.values())

    assert first_size(None) == 1
    assert first_size(Knowledge()) > 1


def test_a_fixed_batch_is_fitted_as_one() -> None:
    """What was never tried scales perfectly, as in the job's own fit: smaller shares take that much less."""
    knowledge = Knowledge()
    one = dataclasses.replace(measured("old", (2,)), max_batch_size=None)
    knowledge.learn(one, 0.0)
    for batch, ratio in ((None, 0.5), (4096, 0.75)):
        told = knowledge.complete(dataclasses.replace(one, max_batch_size=batch), 0.0).goodput
        assert told is not None
        halved = told.throughput_model.grad_time(32) / told.throughput_model.grad_time(64)
        assert halved == pytest.approx(ratio, rel=0.02)


def test_a_measurement_that_is_corrected_corrects_the_model() -> None:
    """The first steps of a job are slow, and it may never run in another shape."""
    knowledge = Knowledge()
    first = measured("old", (2,))
    slow = dataclasses.replace(first.observations["T4"][0], step_time=5.0)
    for seen, expected in ((slow, 5.0), (first.observations["T4"][0], first.observations["T4"][0].step_time)):
        knowledge.learn(dataclasses.replace(first, observations={"T4": (seen,)}), 0.0)
        told = knowledge.complete(first, 0.0).goodput
        assert told is not None
        assert told.step_time(1, 2, 64, 0) == pytest.approx(expected, rel=0.02)


def test_a_newcomer_knows_how_long_an_epoch_is_also_from_a_run_that_counts_several_as_one() -> None:
    knowledge = Knowledge()
    long = Progress(done=900.0, epoch_ends=(400.0, 800.0), epochs=50.0, stride=4)
    knowledge.learn(dataclasses.replace(measured("old", (1, 2)), progress=long), 0.0)
    begun = dataclasses.replace(fresh(), progress=Progress(done=3.0, epochs=10.0))
    told = knowledge.complete(begun, 1.0).progress
    assert told is not None and told.usual_epoch == 100.0
    assert remaining(told) == 997.0
    other = dataclasses.replace(begun, fingerprint="another")
    assert knowledge.complete(other, 1.0).progress == begun.progress


def test_noise_is_told_in_the_batches_of_the_job_that_hears_of_it() -> None:
    """The variance is that of the mean over M0 samples: twice the M0, half the variance."""
    knowledge = Knowledge()
    knowledge.learn(measured("old", (1, 2)), 0.0)
    told = knowledge.complete(dataclasses.replace(fresh(), init_batch_size=128), 1.0).goodput
    assert told is not None and (told.noise.sqr, told.noise.var) == (MODEL.noise.sqr, MODEL.noise.var / 2)


def test_what_is_known_of_other_types_does_not_take_the_place_of_the_type_that_a_job_is_on() -> None:
    knowledge = Knowledge()
    slow = measured("old", (1, 2, 4), gpu="T4")
    fast = [dataclasses.replace(each, step_time=each.step_time / 3) for each in slow.observations["T4"]]
    knowledge.learn(slow, 0.0)
    knowledge.learn(dataclasses.replace(slow, models={"A100": MODEL}, observations={"A100": tuple(fast)}), 0.0)
    told = knowledge.complete(measured("new", (1,), gpu="T4"), 1.0)
    assert told.goodput == told.models["T4"] != told.models["A100"]
