"""What the allocator keeps beside its jobs' results: one storage that hangs holds up no other, and no decision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.fs
import pytest

import placement.knowledge.store
from placement.knowledge.records import Measurements
from placement.knowledge.store import FOLDER, KnowledgeStore, KnowledgeSync, StorageRoot
from tests.hanging_storage import HangingStorage
from tests.placement.measured import measured
from tests.placement.stored_knowledge import NOW_S, knowing


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_a_hanging_root_holds_up_no_other_recalled_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.knowledge.store, "_LOAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(placement.knowledge.store, "_SAVE_TIMEOUT_S", 0.5)
    hanging, recalled = HangingStorage(tmp_path), list[Measurements]()
    away = StorageRoot(path="runs", filesystem=hanging.filesystem)
    here = StorageRoot(path=str(tmp_path / "here"), filesystem=pyarrow.fs.LocalFileSystem())
    KnowledgeStore(away, "other").save(knowing(1, 2).measurements(["resnet"], NOW_S))

    async def run() -> None:
        knowledge = knowing(1)
        keeper = KnowledgeSync(knowledge, "own", recalled.append)
        hanging.hang()
        begin_s = time.monotonic()
        for job in "abcdefgh":  # more than any pool of threads has
            await keeper.open(job, away)
        await keeper.open("z", here)
        assert time.monotonic() - begin_s < 60
        keeper.heard(measured("z", (1,)))
        keeper.ended("z")
        await keeper.save(now=True)
        assert (tmp_path / "here" / FOLDER / "own.parquet").is_file()
        assert not any(measurements.steps for measurements in recalled)
        hanging.answer()
        await until(lambda: any(measurements.steps for measurements in recalled))
        keeper.heard(measured("a", (1,)))
        hanging.hang()
        begin_s = time.monotonic()
        knowledge.learn(measured("old", (4,)), time.time())
        await keeper.save(now=True)
        assert time.monotonic() - begin_s < 60, "who waits for it waits a little"
        hanging.answer()
        await until(lambda: (hanging.root / "runs" / FOLDER / "own.parquet").is_file())

    try:
        asyncio.run(run())
    finally:
        hanging.answer()
