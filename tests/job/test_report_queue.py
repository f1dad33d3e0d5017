"""The queue of a job's reports: in order, each once, and training not too far ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.events import Report
from elastic_ray.record.report_queue import ReportQueue


def report(index: int, score: float = 0.0) -> Report:
    return Report(index=index, metrics={"score": score})


async def _take(report_queue: ReportQueue, count: int) -> list[int]:
    taken: list[int] = []
    after = None
    for _ in range(count):
        found = await report_queue.next(after, 1.0)
        assert found is not None
        after = found.index
        taken.append(after)
    return taken


@given(st.permutations(range(4, 9)), st.lists(st.integers(4, 8)))
def test_reports_come_in_order_and_once_however_they_arrive(order: Sequence[int], again: list[int]) -> None:
    async def run() -> list[int]:
        report_queue = ReportQueue(taken=3)
        for index in [*order, *again]:
            report_queue.put(report(index))
        return await _take(report_queue, 5)

    assert asyncio.run(run()) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_training_waits_once_it_is_so_many_reports_ahead(ahead: int) -> None:
    async def run() -> tuple[int, int]:
        report_queue, made = ReportQueue(ahead=ahead), 0

        async def train() -> None:
            nonlocal made
            for index in range(1, 10):
                report_queue.put(report(index))
                await report_queue.wait_for_reader(index)
                made = index

        training = asyncio.ensure_future(train())
        await asyncio.sleep(0.01)
        before = made
        first = await report_queue.next(None, 1.0)
        assert first is not None
        await report_queue.next(first.index, 1.0)  # the first one is dealt with
        await asyncio.sleep(0.01)
        after = made
        report_queue.close()
        await training
        return before, after

    assert asyncio.run(run()) == (ahead, ahead + 1)


def test_a_waiting_reader_hears_at_once_that_nothing_comes() -> None:
    async def run() -> tuple[Report | None, Report | None]:
        report_queue = ReportQueue()
        report_queue.put(report(1))
        waiting = asyncio.ensure_future(report_queue.next(1, 60.0))
        await asyncio.sleep(0.01)
        report_queue.close()
        return await asyncio.wait_for(waiting, 1.0), await report_queue.next(0, 1.0)

    last, known = asyncio.run(run())
    assert last is None
    assert known == report(1)


def test_waiting_ends_in_time() -> None:
    assert asyncio.run(ReportQueue().next(None, 0.01)) is None


def test_a_report_lost_with_its_controller_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.record.report_queue._MISSING_S", 0.2)

    async def scenario() -> None:
        report_queue = ReportQueue()
        for index in (1, 2, 4, 5):
            report_queue.put(report(index))
        assert await _take(report_queue, 2) == [1, 2]
        assert await report_queue.next(2, 0.05) is None, "it may only be late"
        found = await report_queue.next(2, 5.0)
        assert found is not None and found.index == 4
        following = await report_queue.next(4, 1.0)
        assert following is not None and following.index == 5

    asyncio.run(scenario())


def test_a_report_no_longer_kept_ends_the_wait() -> None:
    async def scenario() -> None:
        report_queue = ReportQueue(keep=2)
        for index in range(1, 6):
            report_queue.put(report(index))
        assert report_queue.wanted(None) == 1 and report_queue.wanted(3) == 4
        assert [report_queue.gone(index) for index in range(1, 7)] == [True, True, True, False, False, False]
        assert report_queue.oldest == 4
        assert await asyncio.wait_for(report_queue.next(1, 60.0), 5.0) is None, "it will not come again"
        kept = await report_queue.next(3, 1.0)
        assert kept is not None and kept.index == 4, "the one before it is gone, and it is there"
        waiting = asyncio.ensure_future(report_queue.next(5, 60.0))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "what is still to come is waited for"
        report_queue.put(report(6))
        last = await asyncio.wait_for(waiting, 5.0)
        assert last is not None and last.index == 6 and report_queue.wanted(None) == 6

    asyncio.run(scenario())


def test_run_continues_after_report_that_it_had_come_to() -> None:
    async def scenario() -> None:
        report_queue = ReportQueue()
        report_queue.start_after(4)
        report_queue.start_after(2)
        assert report_queue.wanted(None) == 5
        report_queue.put(report(5))
        found = await report_queue.next(None, 1.0)
        assert found is not None and found.index == 5

    asyncio.run(scenario())
