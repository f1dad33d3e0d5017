"""What jobs of one fingerprint learn from each other, and when it is forgotten."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged
from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster
from placement.cluster.jobs import FoundStrategy, JobView, Progress
from placement.goodput.fitting import Observation
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.remaining import remaining
from placement.knowledge.knowledge import Knowledge, KnowledgeConfig, machine_of
from placement.knowledge.records import Batches, KnownNoise, KnownStep, Measurements, covers, merged, shape_of
from placement.policies import GoodputPolicy
from tests.placement.measured import MODEL, fresh, measured
from tests.placement.views import AT_ONCE, cluster, node


def test_newcomer_knows_what_others_measured_and_need_not_explore() -> None:
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


def raced(job: str, name: str, step_s: float = 0.5, fingerprint: str | None = "resnet") -> JobView:
    found = {"0 gloo 0,1": FoundStrategy(name=name, step_s=step_s)}
    return dataclasses.replace(fresh(fingerprint), job=job, strategies=found)


def names(knowledge: Knowledge, now_s: float = 1.0, fingerprint: str = "resnet") -> dict[str, str]:
    return {form: found.name for form, found in (knowledge.strategies(fresh(fingerprint), now_s) or {}).items()}


def test_strategies_that_won_are_known_to_others() -> None:
    knowledge = Knowledge(KnowledgeConfig(forget_s=100.0))
    knowledge.learn(raced("a", "ring"), 0.0)
    knowledge.learn(raced("b", "tree", fingerprint="bert"), 0.0)
    assert knowledge.strategies(fresh(None), 1.0) is None and knowledge.strategies(fresh("other"), 1.0) == {}
    assert names(knowledge) == {"0 gloo 0,1": "ring"} and names(knowledge, fingerprint="bert") == {"0 gloo 0,1": "tree"}
    knowledge.learn(raced("c", "star"), 2.0)
    version = knowledge.version
    knowledge.learn(raced("a", "ring"), 3.0)
    assert names(knowledge, 4.0) == {"0 gloo 0,1": "star"}, "the newest race; each heartbeat repeats older ones"
    assert knowledge.version == version
    knowledge.ended("a", 5.0)
    assert names(knowledge, 6.0) and not names(knowledge, 103.0)


def test_strategies_outlive_an_allocator_and_merge() -> None:
    first, second, third = Knowledge(), Knowledge(), Knowledge()
    first.learn(raced("a", "ring"), 1.0)
    second.learn(raced("b", "star"), 2.0)
    kept = [each.measurements(["resnet"], 3.0) for each in (second, first)]
    third.recall(merged(kept), 3.0)
    assert names(third, 3.0) == {"0 gloo 0,1": "star"}
    third.recall(kept[1], 3.0)
    assert names(third, 3.0) == {"0 gloo 0,1": "star"}, "what is older changes nothing"
    assert covers(kept[0], kept[1], 0.0) and not covers(kept[1], kept[0], 0.0)


@pytest.mark.parametrize(("name", "step_s"), [("", 1.0), ("ring", 0.0), ("ring", 1e9)])
def test_a_strategy_without_name_or_time_is_refused(name: str, step_s: float) -> None:
    with pytest.raises(ValueError, match="needs a name and a step above 0 s"):
        FoundStrategy(name=name, step_s=step_s)


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


def test_core_lets_a_newcomer_start_where_others_have_been() -> None:
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


@pytest.mark.parametrize(("most", "known"), [(None, True), (64, True), (4096, False)])
def test_jobs_of_one_batch_share_speeds_without_noise(most: int | None, known: bool) -> None:
    knowledge = Knowledge()
    still = GoodputModel(MODEL.throughput_model, NoiseScale(sqr=0.0, var=0.0), 64)
    knowledge.learn(dataclasses.replace(measured("old", (1, 2)), max_batch_size=None, models={"T4": still}), 0.0)
    told = knowledge.complete(dataclasses.replace(fresh(), max_batch_size=most), 1.0)
    assert (told.goodput is not None) == known and told.most_workers == (2 if known else fresh().most_workers)


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


@pytest.mark.parametrize(("factor", "anew"), [(1.1, False), (1.5, True), (0.9, False), (0.5, True)])
def test_only_a_measurement_that_differs_much_corrects_the_model(factor: float, anew: bool) -> None:
    """Medians move a little with each report, and a model that moves with them would move jobs."""
    knowledge, first = Knowledge(), measured("old", (1, 2, 4))
    knowledge.learn(first, 0.0)
    before = knowledge.complete(fresh(), 0.0).goodput
    seen = first.observations["T4"]
    moved = (*seen[:2], dataclasses.replace(seen[2], step_time=factor * seen[2].step_time))
    knowledge.learn(dataclasses.replace(first, observations={"T4": moved}), 1.0)
    told = knowledge.complete(fresh(), 2.0)
    assert (told.goodput != before) == anew
    assert told.observations["T4"] == moved, "what was measured is told in any case"


def test_a_newcomer_knows_an_epochs_length_from_grouped_runs() -> None:
    knowledge = Knowledge()
    long = Progress(done=900.0, epoch_ends=(400.0, 800.0), epochs=50.0, stride=4)
    knowledge.learn(dataclasses.replace(measured("old", (1, 2)), progress=long), 0.0)
    begun = dataclasses.replace(fresh(), progress=Progress(done=3.0, epochs=10.0))
    told = knowledge.complete(begun, 1.0).progress
    assert told is not None and told.usual_epoch == 100.0
    assert remaining(told) == 997.0
    other = dataclasses.replace(begun, fingerprint="another")
    assert knowledge.complete(other, 1.0).progress == begun.progress


def test_noise_is_told_in_the_hearing_jobs_batches() -> None:
    """The variance is that of the mean over M0 samples: twice the M0, half the variance."""
    knowledge = Knowledge()
    knowledge.learn(measured("old", (1, 2)), 0.0)
    told = knowledge.complete(dataclasses.replace(fresh(), init_batch_size=128), 1.0).goodput
    assert told is not None and (told.noise.sqr, told.noise.var) == (MODEL.noise.sqr, MODEL.noise.var / 2)


def test_other_types_knowledge_does_not_replace_the_present_type() -> None:
    knowledge = Knowledge()
    slow = measured("old", (1, 2, 4), gpu="T4")
    fast = [dataclasses.replace(each, step_time=each.step_time / 3) for each in slow.observations["T4"]]
    knowledge.learn(slow, 0.0)
    knowledge.learn(dataclasses.replace(slow, models={"A100": MODEL}, observations={"A100": tuple(fast)}), 0.0)
    told = knowledge.complete(measured("new", (1,), gpu="T4"), 1.0)
    assert told.goodput == told.models["T4"] != told.models["A100"]


def batches(init: int = 32) -> Batches:
    return Batches(init_batch_size=init, max_batch_size=256, atomic_bsz_range=(4, 32), accumulation=True)


def step(fingerprint: str = "resnet", gpu: str = "T4", *, at_s: float = 0.0, **more: Any) -> KnownStep:
    observation = Observation(1, more.pop("replicas", 2), 64, 0, more.pop("time", 1.0))
    return KnownStep(
        fingerprint=fingerprint,
        gpu_type=gpu,
        machines=frozenset(more.pop("on", ())),
        observation=observation,
        seen_s=at_s,
    )


def noise(epoch: int = 0, var: float = 10.0, *, at_s: float = 0.0, init: int = 32) -> KnownNoise:
    return KnownNoise(
        fingerprint="resnet",
        gpu_type="T4",
        epoch=epoch,
        noise=NoiseScale(sqr=1.0, var=var),
        batches=batches(init),
        seen_s=at_s,
    )


def seen(knowledge: Knowledge, now_s: float = 10.0) -> dict[tuple[str, int], float]:
    """Step times that are known, by GPU type and workers."""
    found = knowledge.measurements(["resnet"], now_s).steps
    return {(each.gpu_type, each.observation.replicas): each.observation.step_time for each in found}


def test_kept_measurements_of_other_machines_or_times_are_dropped() -> None:
    knowledge = Knowledge(KnowledgeConfig(forget_s=100.0))
    labels = {GPU_TYPE_LABEL: "T4"}
    knowledge.machines(Cluster(nodes=(node("n0", 4, labels=labels),)))
    there = machine_of(node("n0", 4))
    steps = (
        step(replicas=1, on=("9 CPU",)),
        step(replicas=2, on=("9 CPU", there)),
        step(replicas=3),  # of machines that are not known
        step(replicas=4, on=(there,), at_s=-91.0),
        step(replicas=5, on=(there,), at_s=-90.0),
        step(replicas=6, gpu="A100", on=("9 CPU",)),  # a type that is not there yet
    )
    knowledge.recall(Measurements(steps=steps), 10.0)
    assert set(seen(knowledge)) == {("T4", 2), ("T4", 3), ("T4", 5), ("A100", 6)}
    assert set(seen(knowledge, 10.5)) == {("T4", 2), ("T4", 3), ("A100", 6)}


def test_kept_measurements_never_replace_told_or_newer_ones() -> None:
    knowledge = Knowledge()
    knowledge.learn(measured("own", (1,)), 5.0)
    own = float(MODEL.step_time(1, 1, 64, 0))
    knowledge.recall(Measurements(steps=(step(replicas=1, time=9.0, at_s=8.0), step(replicas=2, time=1.0))), 10.0)
    assert seen(knowledge) == {("T4", 1): own, ("T4", 2): 1.0}
    knowledge.recall(Measurements(steps=(step(replicas=2, time=2.0, at_s=-1.0),)), 10.0)
    assert seen(knowledge)["T4", 2] == 1.0, "it is older"
    knowledge.recall(Measurements(steps=(step(replicas=2, time=3.0, at_s=99.0),)), 10.0)
    assert seen(knowledge)["T4", 2] == 3.0
    knowledge.recall(Measurements(steps=(step(replicas=2, time=4.0, at_s=10.0),)), 10.0)
    assert seen(knowledge)["T4", 2] == 4.0, "a time ahead of now counted as now"


def test_of_noise_the_newest_of_an_epoch_is_kept() -> None:
    knowledge = Knowledge()
    known = [noise(0, 10.0, at_s=1.0), noise(0, 11.0, at_s=3.0), noise(0, 12.0, at_s=2.0), noise(4, 40.0, at_s=0.0)]
    knowledge.recall(Measurements(steps=(step(),), noises=tuple(known)), 10.0)
    kept = {each.epoch: each.noise.var for each in knowledge.measurements(["resnet"], 10.0).noises}
    assert kept == {0: 11.0, 4: 40.0}

    def told(ends: int) -> float:
        begun = dataclasses.replace(
            fresh(), init_batch_size=32, progress=Progress(done=1.0 + ends, epoch_ends=tuple(range(1, ends + 1)))
        )
        found = knowledge.complete(begun, 10.0).goodput
        assert found is not None
        return found.noise.var

    assert (told(0), told(4)) == (11.0, 40.0)
    assert told(2) == 11.0, "the earliest that is known: noise rises as training continues"


def test_a_job_without_batch_takes_its_kinds_latest_limits() -> None:
    knowledge = Knowledge()
    known = (noise(0, at_s=1.0, init=16), noise(1, at_s=9.0, init=32), noise(2, at_s=5.0, init=64))
    knowledge.recall(Measurements(steps=(step(),), noises=known), 10.0)
    starting = dataclasses.replace(fresh(), init_batch_size=None, max_batch_size=None)
    told = knowledge.complete(starting, 10.0)
    assert (told.init_batch_size, told.max_batch_size, told.atomic_bsz_range) == (32, 256, (4, 32))
    assert knowledge.complete(fresh(), 10.0).init_batch_size == 64, "its own, where it has told it"
    assert Knowledge().complete(starting, 10.0) == starting


def test_job_is_told_types_it_has_no_model_of() -> None:
    knowledge = Knowledge()
    knowledge.learn(measured("old", (1, 2, 4), gpu="T4"), 0.0)
    knowledge.learn(measured("fast", (1, 2), gpu="A100"), 0.0)
    assert set(knowledge.priors(fresh(), 1.0)) == {"T4", "A100"}
    assert {gpu: prior.largest_batch for gpu, prior in knowledge.priors(fresh(), 1.0).items()} == {
        "T4": 4 * 64,
        "A100": 2 * 64,
    }
    assert set(knowledge.priors(measured("new", (1,), gpu="T4"), 1.0)) == {"A100"}
    both = dataclasses.replace(fresh(), models={"T4": MODEL, "A100": MODEL})
    assert knowledge.priors(both, 1.0) == {}
    assert knowledge.priors(fresh("bert"), 1.0) == {} and knowledge.priors(fresh(None), 1.0) == {}


def test_type_whose_measurements_are_forgotten_does_not_hide_others() -> None:
    knowledge = Knowledge(KnowledgeConfig(forget_s=100.0))
    knowledge.learn(measured("old", (1, 2), gpu="A100"), 0.0)
    knowledge.learn(measured("later", (1, 2), gpu="T4"), 90.0)
    for _ in range(2):  # the first look forgets, the second finds nothing of that type
        told = knowledge.complete(fresh(), 150.0)
        assert set(told.models) == {"T4"}


def test_a_version_rises_with_what_is_worth_keeping() -> None:
    knowledge, old = Knowledge(), measured("old", (1, 2))
    knowledge.learn(old, 0.0)
    first = knowledge.version
    assert first == 2 + 1, "two shapes, and the noise of an epoch"
    knowledge.learn(old, 1.0)
    knowledge.learn(dataclasses.replace(old, observations=dict(old.observations)), 2.0)
    assert knowledge.version == first, "the same again"
    knowledge.learn(measured("old", (1, 2, 3)), 3.0)
    assert knowledge.version == first + 1
    still = GoodputModel(MODEL.throughput_model, NoiseScale(sqr=0.0, var=0.0), 64)
    knowledge.learn(dataclasses.replace(measured("one", (1,), gpu="A100"), models={"A100": still}), 4.0)
    assert knowledge.version == first + 2, "a job of one batch does not measure noise"
    none = dataclasses.replace(measured("late", (1,)), progress=Progress(done=0.0, epoch_ends=(0.0,), epochs=3.0))
    knowledge.learn(none, 5.0)
    begun = dataclasses.replace(fresh(), progress=Progress(done=3.0, epochs=10.0))
    progress = knowledge.complete(begun, 6.0).progress
    assert progress is not None and progress.usual_epoch is None, "an epoch without progress says nothing"


def test_what_a_job_repeats_counts_again_on_other_machines() -> None:
    """The same measurements were dropped with the machine; told again after it, they are of the new one."""
    knowledge, labels = Knowledge(), {GPU_TYPE_LABEL: "T4"}
    for job in (old := measured("old", (1, 2)), other := measured("other", (1,), gpu="A100")):
        knowledge.learn(job, 0.0)
    for cpus, known in ((4, {"T4", "A100"}), (8, {"A100"})):
        knowledge.machines(Cluster(nodes=(node("n0", cpus, labels=labels),)))
        knowledge.learn(other, 0.0)
        assert typed(knowledge) == known
        knowledge.learn(old, 0.0)
        assert typed(knowledge) == {"T4", "A100"}


def typed(knowledge: Knowledge) -> set[str]:
    """GPU types of what is known."""
    return {each.gpu_type for each in knowledge.measurements(["resnet"], 0.0).steps}


def test_a_type_stays_known_while_one_kind_stays() -> None:
    knowledge, labels = Knowledge(), {GPU_TYPE_LABEL: "T4"}
    for cpus in ((4,), (4, 8), (8,), ()):
        nodes = tuple(node(f"n{n}", n, labels=labels) for n in cpus)
        knowledge.machines(Cluster(nodes=nodes))
        knowledge.learn(measured("old", (1,)), 0.0)
        assert knowledge.complete(fresh(), 0.0).models, cpus
    knowledge.machines(Cluster(nodes=(node("n9", 9, labels=labels),)))
    assert not knowledge.complete(fresh(), 0.0).models


def test_machines_are_told_apart_by_their_devices() -> None:
    gpus = dataclasses.replace(node("n", 8), total={"GPU": 2.0, "CPU": 8.0, "memory": 9e9, "TPU": 1.0})
    assert machine_of(gpus) == "8 CPU 2 GPU" and machine_of(dataclasses.replace(gpus, total={"GPU": 0.0})) == ""


def test_a_jobs_end_lets_its_name_tell_anew() -> None:
    knowledge = Knowledge(KnowledgeConfig(forget_s=100.0))
    old = measured("old", (1,))
    knowledge.learn(old, 0.0)
    assert not knowledge.complete(fresh(), 200.0).models
    knowledge.learn(old, 200.0)
    assert not knowledge.complete(fresh(), 200.0).models, "it was told long ago"
    knowledge.ended("another", 201.0)
    knowledge.learn(old, 201.0)
    assert not knowledge.complete(fresh(), 201.0).models
    knowledge.ended("old", 202.0)
    knowledge.learn(old, 202.0)
    assert knowledge.complete(fresh(), 202.0).models


def test_limits_of_growth_are_twice_what_anybody_had() -> None:
    knowledge = Knowledge()
    knowledge.learn(measured("old", (1, 3)), 0.0)
    for limit, most, told in ((None, 0, (None, 3)), (1, 0, (6, 3)), (9, 5, (9, 5))):
        new = dataclasses.replace(fresh(), growth_limit=limit, most_workers=most)
        known = knowledge.complete(new, 0.0)
        assert (known.growth_limit, known.most_workers) == told


def test_the_time_of_forgetting_itself_still_counts() -> None:
    knowledge = Knowledge(KnowledgeConfig(forget_s=100.0))
    knowledge.learn(dataclasses.replace(raced("a", "ring"), observations=measured("a", (1,)).observations), 0.0)
    knowledge.recall(Measurements(noises=(noise(),)), 100.0)
    kept = knowledge.measurements(["resnet"], 100.0)
    assert kept.steps and kept.noises and kept.strategies and names(knowledge, 100.0)
    assert knowledge.measurements(["resnet"], 100.1) == Measurements()


def test_prior_knows_the_largest_batch_with_its_micro_steps() -> None:
    knowledge = Knowledge()
    seen = (Observation(1, 2, 64, 3, 1.0), Observation(1, 4, 64, 0, 0.5))
    knowledge.learn(dataclasses.replace(measured("old", (1,)), observations={"T4": seen}), 0.0)
    assert knowledge.priors(fresh(), 0.0)["T4"].largest_batch == 2 * 64 * 4


def test_of_several_writers_the_newest_of_a_shape_counts() -> None:
    first = Measurements(
        steps=(step(at_s=1.0, time=1.0), step(at_s=1.0, replicas=3)), noises=(noise(at_s=5.0, var=5.0),)
    )
    later = Measurements(
        steps=(step(at_s=2.0, time=2.0), step(at_s=0.0, time=9.0, on=("x",))), noises=(noise(at_s=2.0),)
    )
    for order in ((first, later), (later, first)):
        found = merged(order)
        assert {(each.observation.replicas, each.machines, each.observation.step_time) for each in found.steps} == {
            *((2, frozenset(), 2.0), (3, frozenset(), 1.0), (2, frozenset({"x"}), 9.0))
        }
        assert [each.noise.var for each in found.noises] == [5.0]


@pytest.mark.parametrize(
    ("mine", "theirs", "since_s", "covered"),
    [
        (step(on="a"), step(on="a"), 0.0, True),
        (step(on="a", at_s=2.0), step(on="ab", at_s=2.0), 0.0, True),
        (step(on="a", at_s=2.0), step(on="b", at_s=2.0), 0.0, False),
        (step(on="a", at_s=2.0), step(on="a", at_s=3.0), 0.0, False),
        (step(on="a", at_s=2.0), step(on="a", at_s=3.0), 3.0, True),  # which does not count any more
        (step(on="a", replicas=3), step(on="a", at_s=3.0), 0.0, False),
        (noise(at_s=2.0), noise(at_s=2.0), 0.0, True),
        (noise(at_s=2.0), noise(at_s=3.0), 0.0, False),
        (noise(at_s=2.0), noise(at_s=3.0), 3.0, True),
        (noise(1, at_s=9.0), noise(at_s=3.0), 0.0, False),
    ],
)
def test_a_file_covers_another_that_says_no_more(mine: Any, theirs: Any, since_s: float, covered: bool) -> None:
    def of(each: KnownStep | KnownNoise) -> Measurements:
        return Measurements(steps=(each,)) if isinstance(each, KnownStep) else Measurements(noises=(each,))

    assert covers(of(mine), of(theirs), since_s) is covered


@pytest.mark.parametrize(("batch", "power"), [(1, 0), (2, 1), (45, 5), (46, 6), (64, 6), (90, 6), (91, 7)])
def test_batches_near_a_power_of_two_are_one_shape(batch: int, power: int) -> None:
    assert shape_of(Observation(2, 8, batch, 3, 1.0)) == (2, 8, 3, power)
