"""The coordinator of Ray Data in this process, over executions that a test scripts: which fail, close and wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from elastic_ray.integrations.ray_data import coordinator
from elastic_ray.integrations.ray_data.coordinator import DatasetCoordinator, RowsFound, RowsWanted
from elastic_ray.integrations.ray_data.row_window import Reader, Readers

_WAIT_S = 20.0


def wanted(first: int, end: int, *, client: str = "a", generation: int = 1, **more: Any) -> RowsWanted:
    """A question of the only rank of a group."""
    position, run = more.pop("position", first), more.pop("run", client)
    reader = Reader(client=client, generation=generation, world_size=1, rank=0, position=position, run=run)
    return RowsWanted(
        **{"dataset": "train", "epoch": 0, "first": first, "end": end, "ahead": end, "last_epoch": True, **more},
        reader=reader,
    )


class Execution:
    """One execution of the dataset: blocks of 10 rows; what it waits for is ended by its shutdown."""

    def __init__(self, executions: Executions, number: int) -> None:
        self._executions, self._number = executions, number
        self._ended = threading.Event()

    def bundles(self) -> Iterator[Any]:
        """Blocks as Ray Data hands them out, with what the test says goes wrong."""
        made, number = self._executions, self._number
        for block in range(made.blocks):
            if made.broken.get(number) == block:
                raise OSError("storage did not answer (503)")
            if made.stuck and block:
                self._ended.wait(_WAIT_S)
                return
            entry = SimpleNamespace(ref=f"block {block} of execution {number}", metadata=SimpleNamespace(num_rows=10))
            yield SimpleNamespace(blocks=[entry], slices=[None])
        if made.broken.get(number) == made.blocks:
            raise OSError("storage did not answer (503)")

    def shutdown(self, force: bool) -> None:
        """As that of Ray Data's executor."""
        self._ended.set()


class Executions:
    """A dataset whose executions the test scripts.

    Attributes:
        started: epoch of each execution that was started.
        broken: executions of these numbers fail after so many blocks.
    """

    def __init__(self) -> None:
        self.started: list[int] = []
        self.broken: dict[int, int] = {}
        self.blocks, self.stuck = 2, False

    def hold_order(self, dataset: Any, *, epoch: int, seed: int) -> None:
        """What the stream does first with a dataset: another copy of it is executed for each epoch."""
        self.started.append(epoch)

    def _execute_to_iterator(self) -> tuple[Iterator[Any], None, Execution]:
        execution = Execution(self, len(self.started) - 1)
        return execution.bundles(), None, execution


@pytest.fixture
def executions(monkeypatch: pytest.MonkeyPatch) -> Executions:
    made = Executions()
    monkeypatch.setattr("ray.cloudpickle.loads", lambda packed: made)
    monkeypatch.setattr(coordinator, "hold_order", made.hold_order)
    monkeypatch.setattr(coordinator, "leave_room", lambda dataset, left: None)
    monkeypatch.setattr(coordinator, "_slow", lambda dataset: f"{dataset}: no rows; CPUs")
    return made


class Packed:
    """What of the packed datasets is asked for."""

    seed = 0
    left: ClassVar[dict[str, float]] = {}


def run(main: Callable[[Any], Any]) -> Any:
    """Carry it out with a coordinator; nothing waits in it afterwards."""

    async def with_coordinator() -> Any:
        coordinator: Any = object.__new__(DatasetCoordinator)
        coordinator._packed, coordinator._readers, coordinator._waiting = Packed(), Readers(), set()
        coordinator._datasets, coordinator._streams = {"train": b""}, {"train": []}
        coordinator._loop = asyncio.get_running_loop()
        found = await asyncio.wait_for(main(coordinator), _WAIT_S)
        assert not coordinator._waiting
        for each in tuple(coordinator._streams["train"]):
            coordinator._close(each, readers_gone=True)
        return found

    return asyncio.run(with_coordinator())


async def until_waiting(coordinator: Any, ranks: int = 1) -> None:
    while len(coordinator._waiting) < ranks:
        await asyncio.sleep(0.01)


def blocks(found: RowsFound) -> list[str]:
    return [span.block for span in found.spans]


def test_a_rerun_has_another_execution_than_the_failed_one(executions: Executions) -> None:
    async def main(coordinator: Any) -> None:
        executions.broken = {0: 0}
        with pytest.raises(OSError, match="503"):
            await coordinator.rows(wanted(0, 15))
        again = await coordinator.rows(wanted(0, 15, client="b", generation=2))
        assert blocks(again) == ["block 0 of execution 1", "block 1 of execution 1"]
        assert coordinator._streams["train"] and not any(each.failed for each in coordinator._streams["train"])

    run(main)


def test_one_that_failed_later_is_not_continued_from_checkpoints(executions: Executions) -> None:
    async def main(coordinator: Any) -> None:
        executions.broken = {0: 1}
        with contextlib.suppress(OSError):
            await coordinator.rows(wanted(0, 5))
            await coordinator.rows(wanted(10, 15, position=8))
        again = await coordinator.rows(wanted(8, 15, client="b", generation=2))
        assert blocks(again) == ["block 0 of execution 1", "block 1 of execution 1"]

    run(main)


def test_every_rank_that_waits_is_told_of_the_error(executions: Executions) -> None:
    async def main(coordinator: Any) -> None:
        executions.stuck = True
        asks = [asyncio.ensure_future(coordinator.rows(wanted(0, 15, client=client))) for client in "abc"]
        await until_waiting(coordinator, 3)
        (stream,) = coordinator._streams["train"]
        with stream._lock:
            stream._error = OSError("503")
        coordinator._wake()
        told = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(each) for each in told] == [OSError] * 3 and coordinator._streams["train"] == []

    run(main)


def test_an_epoch_begun_ahead_that_failed_does_not_count(executions: Executions) -> None:
    async def main(coordinator: Any) -> None:
        executions.broken = {1: 0}
        for end in (15, 20, 25):
            await coordinator.rows(wanted(0, end, last_epoch=False))
        while not any(each.failed for each in coordinator._streams["train"]):
            await asyncio.sleep(0.01)
        await coordinator.rows(wanted(0, 25, last_epoch=False))
        assert executions.started == [0, 1], "it is not tried over and over"
        found = await coordinator.rows(wanted(0, 15, epoch=1))
        assert executions.started == [0, 1, 1] and blocks(found)[0] == "block 0 of execution 2"

    run(main)


def test_question_of_a_loop_that_was_left_is_answered(
    executions: Executions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator, "_SLOW_S", 0.5)

    async def main(coordinator: Any) -> None:
        executions.stuck = True
        await coordinator.rows(wanted(0, 5))
        ahead = asyncio.ensure_future(coordinator.rows(wanted(10, 20)))
        await until_waiting(coordinator)
        await coordinator.leave("a")
        assert await ahead == RowsFound(spans=(), total=None)
        assert coordinator._streams["train"] == []
        await asyncio.sleep(0.6)

    with caplog.at_level(logging.WARNING):
        run(main)
    assert not caplog.records and executions.started == [0]


def test_a_wait_is_explained_while_somebody_waits(
    executions: Executions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator, "_SLOW_S", 0.05)

    async def main(coordinator: Any) -> None:
        executions.stuck = True
        ahead = asyncio.ensure_future(coordinator.rows(wanted(0, 20)))
        while not caplog.records:
            await asyncio.sleep(0.01)
        await coordinator.leave("a")
        await ahead

    with caplog.at_level(logging.WARNING):
        run(main)
    assert "train: no rows; CPUs" in caplog.text


def test_an_evaluation_does_not_close_what_the_loop_reads(executions: Executions) -> None:
    async def main(coordinator: Any) -> None:
        executions.blocks = 4
        await coordinator.rows(wanted(0, 5, client="loop", run="r"))
        await coordinator.rows(wanted(10, 20, client="loop", run="r"))
        found = await coordinator.rows(wanted(0, 10, client="check", run="r", generation=2))
        assert blocks(found) == ["block 0 of execution 1"] and len(coordinator._streams["train"]) == 2
        found = await coordinator.rows(wanted(20, 30, client="loop", run="r"))
        assert blocks(found) == ["block 2 of execution 0"]

    run(main)


def test_what_only_dead_workers_have_read_is_closed(executions: Executions) -> None:
    async def main(coordinator: Any) -> None:
        executions.stuck = True
        await coordinator.rows(wanted(0, 5, client="dead"))
        pending = asyncio.ensure_future(coordinator.rows(wanted(10, 20, client="dead")))
        await until_waiting(coordinator)
        await coordinator.rows(wanted(0, 5, client="new", generation=2))
        assert await pending == RowsFound(spans=(), total=None), "nobody reads it, and no execution is started for it"
        assert executions.started == [0, 0] and len(coordinator._streams["train"]) == 1

    run(main)


def test_question_to_a_left_stream_is_put_to_another(executions: Executions) -> None:
    """Both read one stream; the check's group is newer, so that the stream closes when it is through."""

    async def main(coordinator: Any) -> None:
        executions.stuck = True
        await coordinator.rows(wanted(0, 5, client="loop", run="r"))
        pending = asyncio.ensure_future(coordinator.rows(wanted(0, 20, client="loop", run="r")))
        await until_waiting(coordinator)
        await coordinator.rows(wanted(0, 5, client="check", run="r", generation=2))
        executions.stuck = False
        await coordinator.leave("check")
        assert blocks(await pending) == ["block 0 of execution 1", "block 1 of execution 1"]

    run(main)
