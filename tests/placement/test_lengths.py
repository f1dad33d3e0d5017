"""Lengths of jobs that declare none, or wrongly: from where earlier jobs of the same model have ended."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import hypothesis.strategies as st
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobEnded, JobHeartbeat, NodesChanged
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, Progress
from placement.goodput.remaining import gittins_left, likely_left, remaining
from placement.knowledge.knowledge import Knowledge, KnowledgeConfig
from placement.knowledge.records import KnownLength, Measurements, covers, merged, newest
from placement.knowledge.store import KnowledgeStore, StorageRoot
from placement.policies import GoodputPolicy
from tests.placement.views import AT_ONCE, model, node, view

lengths = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=12)


@given(lengths, st.floats(0.0, 1e6))
def test_the_index_is_between_the_nearest_end_and_all(ends: list[float], done: float) -> None:
    left = [end - done for end in ends if end > done]
    index = gittins_left(done, ends)
    if not left:
        assert index == done
    else:
        assert min(left) * (1 - 1e-9) <= index <= sum(left) / len(left) * (1 + 1e-9)


@given(lengths, st.floats(0.0, 1e6), st.floats(0.1, 10.0))
def test_the_index_has_the_unit_of_lengths(ends: list[float], done: float, factor: float) -> None:
    index = gittins_left(done * factor, [end * factor for end in ends])
    assert index == pytest.approx(gittins_left(done, ends) * factor, rel=1e-6, abs=1e-6)


@given(lengths, st.floats(0.0, 1e6))
def test_the_index_is_the_best_place_to_stop(ends: list[float], done: float) -> None:
    left = [end - done for end in ends if end > done]
    by_hand = min((sum(min(x, t) for x in left) / sum(x <= t for x in left) for t in left), default=done)
    assert gittins_left(done, ends) == pytest.approx(by_hand, rel=1e-9)


def test_known_values() -> None:
    assert gittins_left(10.0, [30.0]) == 20.0
    # One of two ends soon: 1 for the one, 1 for the other that continues, for one end; then 99 more for the second.
    assert gittins_left(0.0, [1.0, 100.0]) == 2.0
    assert gittins_left(1.0, [1.0, 100.0]) == 99.0
    assert gittins_left(200.0, [1.0, 100.0]) == 200.0


def test_sure_end_counts_as_nearer_at_the_same_mean() -> None:
    sure = likely_left(Progress(done=0.0, usual_ends=(100.0,) * 8))
    unsure = likely_left(Progress(done=0.0, usual_ends=(100.0,)))
    assert sure is not None and unsure is not None and 100.0 < sure < unsure <= 200.0


def test_a_declaration_that_kept_proving_wrong_is_believed_less() -> None:
    told = Progress(done=10.0, epoch_ends=(10.0,), epochs=1000.0)
    assert likely_left(told) == remaining(told) == 9990.0
    wrong = dataclasses.replace(told, usual_parts=(0.01,) * 9)
    assert likely_left(wrong) == pytest.approx(90.0)
    right = dataclasses.replace(told, usual_parts=(1.0,) * 9)
    assert likely_left(right) == pytest.approx(9990.0)
    beyond = dataclasses.replace(wrong, done=500.0, epoch_ends=(500.0,), epochs=20.0)  # and this one does continue
    assert likely_left(beyond) == remaining(beyond)


def test_beyond_its_declared_end_the_models_lengths_count() -> None:
    beyond = Progress(done=300.0, epoch_ends=(100.0, 200.0, 300.0), epochs=3.0, usual_ends=(900.0,) * 4)
    assert remaining(beyond) == 1.0, "what it declares"
    assert likely_left(beyond) == 600.0
    alone = dataclasses.replace(beyond, usual_ends=())
    assert likely_left(alone) == 300.0, "as much as was done"


def test_the_first_declaration_counts() -> None:
    always_the_last = Progress(done=300.0, epoch_ends=(100.0, 200.0, 300.0), epochs=4.0, first_epochs=1.0)
    assert likely_left(always_the_last) == 300.0 and remaining(always_the_last) == 100.0
    staged = dataclasses.replace(always_the_last, epochs=10.0, first_epochs=2.0, usual_parts=(5.0,) * 8)
    assert likely_left(staged) == 700.0, "its declarer's stages were five each time"


def test_who_declared_wrongly_is_not_believed_others_are() -> None:
    told = Progress(done=10.0, epoch_ends=(10.0,), epochs=30.0)
    liar = dataclasses.replace(told, usual_parts=(3.0,) * 8, usual_ends=(900.0,) * 8)
    assert (likely_left(liar) or 0) > 800.0
    honest = dataclasses.replace(told, usual_parts=(1.0,) * 8, usual_ends=(900.0,) * 8)
    assert likely_left(honest) == 290.0, "though other jobs of the model are longer"
    stranger = dataclasses.replace(told, usual_ends=(900.0,) * 8)
    assert (likely_left(stranger) or 0) > 800.0
    scattered = dataclasses.replace(liar, usual_parts=(0.2, 3.0, 1.0, 9.0))
    assert likely_left(scattered) == likely_left(stranger)


def test_the_longest_running_job_counts_for_who_lies() -> None:
    knowledge = Knowledge()
    for job, done in (("old", 600.0), ("young", 20.0)):
        knowledge.learn(running(job, done, epochs=40.0), 0.0)
    beyond = dataclasses.replace(running("bert", 90.0, epochs=0.5), user="liar", fingerprint="bert")
    knowledge.learn(beyond, 0.5)
    for user, ends in (("liar", (1200.0,)), ("stranger", ())):
        new = dataclasses.replace(running(user, 10.0, epochs=3.0), user=user)
        knowledge.learn(new, 1.0)
        known = knowledge.complete(new, 1.0).progress
        assert known is not None and known.usual_ends == ends
        assert likely_left(known) == (1190.0 if ends else 20.0)


def test_who_went_beyond_elsewhere_counts_by_the_longer() -> None:
    liar = Progress(done=10.0, epoch_ends=(10.0,), epochs=1.5, usual_parts=(4.0,) * 8, usual_ends=(900.0,))
    assert likely_left(liar) == 890.0
    assert likely_left(dataclasses.replace(liar, usual_parts=(1.0,) * 8)) == 5.0
    beyond = dataclasses.replace(liar, done=30.0, epoch_ends=(10.0, 20.0, 30.0), epochs=1.5)
    assert likely_left(beyond) == 870.0


@given(lengths, st.floats(1.0, 1e5), st.floats(0.1, 100.0))
def test_a_declaration_without_record_never_advances(ends: list[float], done: float, epochs: float) -> None:
    told = Progress(done=done, epoch_ends=(done,), epochs=epochs, usual_ends=tuple(ends))
    assert (likely_left(told) or 0.0) >= gittins_left(done, ends) * (1 - 1e-9)


@given(lengths, st.lists(st.floats(1.1, 50.0), min_size=1), st.floats(0.1, 100.0), st.floats(1.0, 1e5))
def test_who_goes_beyond_never_advances(ends: list[float], parts: list[float], epochs: float, done: float) -> None:
    told = Progress(done=done, epoch_ends=(done,), epochs=epochs, usual_ends=tuple(ends), usual_parts=tuple(parts))
    assert (likely_left(told) or 0.0) >= gittins_left(done, ends) * (1 - 1e-9)


@given(lengths, st.integers(1, 32), st.floats(1.1, 100.0))
def test_a_record_of_true_declarations_is_believed(ends: list[float], times: int, epochs: float) -> None:
    told = Progress(done=10.0, epoch_ends=(10.0,), epochs=epochs, usual_ends=tuple(ends), usual_parts=(1.0,) * times)
    assert likely_left(told) == pytest.approx(remaining(told)), "as far as it is nearer than the model's ends, too"


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.booleans())
def test_what_one_declares_changes_nothing_for_others(told: float, other: float, ends: bool) -> None:
    left = []
    for epochs in (told, other):
        knowledge = Knowledge()
        knowledge.learn(dataclasses.replace(running("a", 500.0, epochs=epochs), user="liar"), 0.0)
        if ends:
            knowledge.ended("a", 1.0)
        honest = dataclasses.replace(running("b", 10.0, epochs=40.0), user="honest")
        knowledge.learn(honest, 2.0)
        left.append(likely_left(knowledge.complete(honest, 3.0).progress))
    assert left[0] == left[1]


@given(lengths, st.floats(0.1, 1e5), st.floats(0.1, 100.0))
def test_something_is_left_of_every_job_that_trains(ends: list[float], done: float, epochs: float) -> None:
    left = likely_left(Progress(done=done, epoch_ends=(done / 2, done), epochs=epochs, usual_ends=tuple(ends)))
    assert left is not None and left > 0


def test_declarations_are_learned_by_declarer() -> None:
    knowledge = Knowledge()

    def trains(job: str, user: str, epochs: float, done: float) -> JobView:
        return dataclasses.replace(running(job, done, epochs=epochs), user=user)

    knowledge.learn(trains("a", "liar", 1.0, 100.0), 0.0)
    # Later it declares more, and has five times what it declared first.
    more = Progress(done=500.0, epoch_ends=(100.0, 200.0, 300.0, 400.0, 500.0), epochs=5.0)
    knowledge.learn(dataclasses.replace(trains("a", "liar", 1.0, 500.0), progress=more), 1.0)
    knowledge.ended("a", 2.0)
    (known,) = knowledge.measurements(["resnet"], 3.0).lengths
    assert (known.part, known.declarer) == (5.0, "liar")
    other = dataclasses.replace(trains("c", "liar", 4.0, 10.0), fingerprint="bert")
    borrowed = knowledge.complete(other, 3.0).progress
    assert borrowed is not None and borrowed.usual_parts == (4.0,), "at most, of another model"
    knowledge.learn(dataclasses.replace(other, job="d"), 3.0)
    beyond = Progress(done=90.0, epoch_ends=(45.0, 90.0), epochs=1.0)
    knowledge.learn(dataclasses.replace(other, job="e", user="late", progress=beyond), 3.0)
    proven = knowledge.complete(dataclasses.replace(other, job="f", user="late"), 3.0).progress
    assert proven is not None and proven.usual_parts == (4.0,), "by a job that runs beyond its end"
    knowledge.ended("e", 3.0)
    proven = knowledge.complete(dataclasses.replace(other, job="f", user="late"), 3.0).progress
    assert proven is not None and proven.usual_parts == (2.0,), "once"
    for user, parts in (("liar", (5.0,)), ("honest", ())):
        told = knowledge.complete(trains("b", user, 4.0, 10.0), 3.0).progress
        assert told is not None and told.usual_parts == parts
        assert told.usual_ends == (500.0,), "lengths are everybody's"


def test_nothing_is_known_of_a_job_without_predecessors() -> None:
    assert likely_left(None) is None and likely_left(Progress(done=3.0)) is None


def running(job: str, done: float, *, epochs: float | None = None, batch: int = 32) -> JobView:
    progress = Progress(done=done, epoch_ends=(done,) if epochs else (), epochs=epochs)
    return view(
        job, goodput=model(), fingerprint="resnet", init_batch_size=batch, max_batch_size=None, progress=progress
    )


def test_jobs_learn_from_ended_ones_in_own_iterations() -> None:
    knowledge = Knowledge(KnowledgeConfig(forget_s=100.0))
    knowledge.learn(running("first", 500.0), 0.0)
    knowledge.ended("first", 5.0)
    knowledge.learn(running("second", 100.0, epochs=4.0), 6.0)
    knowledge.ended("second", 7.0)
    told = knowledge.complete(running("third", 50.0, batch=64), 10.0).progress
    assert told is not None and told.usual_ends == (250.0, 50.0) and told.usual_parts == (0.25,)
    late = knowledge.complete(running("third", 50.0), 106.0).progress
    assert late is not None and late.usual_ends == (100.0,)


def test_a_length_is_worth_keeping_once() -> None:
    knowledge = Knowledge()
    for job in (running("a", 0.0), dataclasses.replace(running("c", 5.0), progress=None)):
        knowledge.learn(job, 0.0)
        knowledge.ended(job.job, 1.0)
    assert knowledge.version == 0 and knowledge.measurements(["resnet"], 1.0).lengths == ()
    knowledge.learn(running("d", 5.0), 2.0)
    for _ in range(2):
        knowledge.ended("d", 3.0)
    assert knowledge.version == 1 and len(knowledge.measurements(["resnet"], 3.0).lengths) == 1


def test_shorter_jobs_come_first_though_undeclared() -> None:
    core = AllocatorCore(GoodputPolicy(), AT_ONCE, knowledge=Knowledge())
    core.handle(NodesChanged(cluster=Cluster(nodes=(node("n0", 8),))), 0.0)
    for fingerprint, total in (("short", 1e3), ("long", 1e6)):
        for i in range(4):
            old = dataclasses.replace(running(f"{fingerprint}{i}", total), fingerprint=fingerprint)
            core.handle(JobHeartbeat(view=old), 1.0)
            core.handle(JobEnded(job=old.job), 2.0)
    for job in ("long", "short"):
        core.handle(JobHeartbeat(view=dataclasses.replace(running(job, 10.0), fingerprint=job, max_workers=8)), 3.0)
    reasons = {name: job.reason for name, job in core.snapshot().jobs.items()}
    assert "weight is 1.00" in reasons["short"].figures and "weight is 0.50" in reasons["long"].figures, reasons


def test_only_the_last_lengths_of_a_model_are_kept() -> None:
    many = [KnownLength(fingerprint="a", samples=1.0 + i, part=None, seen_s=float(i)) for i in range(40)]
    kept = newest([*many, *many])
    assert [each.seen_s for each in kept] == [float(i) for i in range(8, 40)]
    mine, theirs = Measurements(lengths=kept), Measurements(lengths=tuple(many[:9]))
    assert covers(mine, theirs, 0.0) and not covers(theirs, mine, 0.0)
    assert merged([theirs, mine]).lengths == kept


def test_lengths_are_kept_in_files_older_ones_are_read(tmp_path: Path) -> None:
    root = StorageRoot(path=str(tmp_path), filesystem=pyarrow.fs.LocalFileSystem())
    known = Measurements(
        lengths=(
            KnownLength(fingerprint="a", samples=12.5, part=None, seen_s=1.0),
            KnownLength(fingerprint="a", samples=3.0, part=0.1, seen_s=2.0, declarer="ann"),
        )
    )
    KnowledgeStore(root, "me").save(known)
    assert KnowledgeStore(root, "other").load() == known
    (file,) = tmp_path.rglob("*.parquet")
    table = pq.ParquetFile(file).read()
    pq.write_table(table.drop_columns(["samples", "part"]).slice(0, 0), file)
    assert KnowledgeStore(root, "other").load() == Measurements()
    pq.write_table(table.set_column(table.column_names.index("samples"), "samples", [[-1.0, 3.0]]), file)
    assert KnowledgeStore(root, "other").load() == Measurements()  # none of ours: reported and left out
