"""When jobs that wait would start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from placement.allocator.snapshot import EVERY_S, CoreSnapshot, JobState, StartTimes, start_times
from placement.cluster.jobs import JobView, Progress, goodputs
from tests.placement.views import cluster, view


def ending(job: str, seconds: float, target: dict[str, int], **more: object) -> tuple[JobView, dict[str, int]]:
    """A job that ends after so many seconds at its present size."""
    rate = goodputs(view(job, **more), list(target.values()))[-1]
    per_epoch = seconds * rate / 64
    progress = Progress(done=per_epoch, epoch_ends=(per_epoch,), epochs=2)
    return view(job, progress=progress, **more), target


def test_the_smallest_size_fits_when_enough_have_ended() -> None:
    running = [ending("a", 10.0, {"n0": 2}), ending("b", 30.0, {"n1": 2})]
    waiting = [view("two", min_workers=2), view("four", min_workers=2, max_workers=4, submitted_s=1.0)]
    found = start_times(waiting, running, cluster(2, 2))
    assert {job: round(start_s, 6) for job, start_s in found.items()} == {"two": 10.0, "four": 30.0}
    assert start_times([view("held", min_workers=1, held_at=4)], running, cluster(2, 2))["held"] > 29


def test_priority_comes_before_arrival() -> None:
    waiting = [view("early", min_workers=2), view("urgent", min_workers=2, submitted_s=9.0, priority=1)]
    assert list(start_times(waiting, [ending("a", 10.0, {"n0": 2})], cluster(2))) == ["urgent"]


def test_what_cannot_be_told_is_left_out() -> None:
    endless = view("endless")
    assert start_times([view("w")], [(endless, {"n0": 2})], cluster(2)) == {}, "no declared length"
    unknown = view("new", goodput=None, progress=Progress(done=5.0, epoch_ends=(5.0,), epochs=2))
    assert start_times([view("w")], [(unknown, {"n0": 2})], cluster(2)) == {}, "no model"
    gpu = view("gpu", bundle={"GPU": 1.0})
    found = start_times([gpu, view("w", submitted_s=1.0)], [ending("a", 10.0, {"n0": 2})], cluster(2))
    assert found.keys() == {"w"}, "another kind of worker does not stand in the way"
    assert start_times([view("w")], [ending("a", 10.0, {"gone": 2})], cluster(2)) == {"w": 0.0}


@given(
    st.lists(st.tuples(st.floats(0.1, 1e4), st.integers(1, 3)), max_size=6),
    st.lists(st.integers(1, 4), max_size=5),
)
def test_a_longer_queue_starts_nobody_earlier(ends: list[tuple[float, int]], sizes: list[int]) -> None:
    running = [ending(f"r{n}", seconds, {f"n{n}": workers}) for n, (seconds, workers) in enumerate(ends)]
    nodes = cluster(*(workers for _, workers in ends))
    waiting = [view(f"w{n}", min_workers=size, submitted_s=float(n)) for n, size in enumerate(sizes)]
    found = start_times(waiting, running, nodes)
    assert all(start_s >= 0 for start_s in found.values())
    assert list(found.values()) == sorted(found.values())
    fewer = start_times(waiting[:-1], running, nodes)
    assert all(fewer[job] <= start_s * (1 + 1e-9) for job, start_s in found.items() if job in fewer)
    assert found.keys() - {"w" + str(len(sizes) - 1)} <= fewer.keys()


def test_one_look_serves_all_askers_and_counts_down() -> None:
    looks = []

    def look() -> CoreSnapshot:
        looks.append(1)
        (busy, target), waits = ending("a", 100.0, {"n0": 2}), view("w")
        states = {each.job: JobState(view=each, target={}, reason="", heard_s=0.0) for each in (waits,)}
        states["a"] = JobState(view=busy, target=target, reason="", heard_s=0.0)
        return CoreSnapshot(policy="goodput", settled=True, cluster=cluster(2), jobs=states, log=())

    starts = StartTimes(look)
    assert round(starts.of("w", 1000.0) or 0) == 100 and round(starts.of("w", 1004.0) or 0) == 96
    assert starts.of("other", 1004.0) is None and len(looks) == 1
    assert round(starts.of("w", 1000.0 + EVERY_S) or 0) == 100 and len(looks) == 2
    assert round(starts.of("w", 0.0) or 0) == 100 and len(looks) == 3, "a clock that went back"


def test_unit_that_spans_nodes_holds_its_part_of_each() -> None:
    unit = ending("unit", 10.0, {"n0*2+n1*1": 1}, bundle={"CPU": 3.0}, unit=3)
    waiting = [view("one", min_workers=1), view("two", min_workers=2, submitted_s=1.0)]
    found = start_times(waiting, [unit], cluster(2, 2))
    assert {job: round(start_s, 6) for job, start_s in found.items()} == {"one": 0.0, "two": 10.0}
