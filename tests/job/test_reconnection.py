"""A controller that has come back continues with the units of which every process has registered."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from elastic_ray.record.controller_state import ControllerState
from elastic_ray.worker.messages import WorkerReregistration
from elastic_ray.worker.setup import ProcessInfo
from elastic_ray.worker_group import reconnection


def told(worker: str, position: int = 0) -> WorkerReregistration:
    return WorkerReregistration(
        worker=worker,
        token="a",
        node="n",
        group="b",
        actor=None,
        process=f"{worker}/{position}",
        lent=False,
        process_info=ProcessInfo(pid=1, cuda=False),
        position=position,
    )


def noted(*processes: str) -> ControllerState:
    """What the controller before has written, of which only the processes count here."""
    values = {field.name: None for field in dataclasses.fields(ControllerState)}
    return ControllerState(**{**values, "processes": dict.fromkeys(processes, ""), "homes": {}, "pids": {}})


def test_units_that_lack_a_process_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnection, "_SILENT_S", 0.1)
    asked = reconnection.Reconnection(noted("w1", "w1.1", "w2", "w2.1"), 2)
    for each in (told("w2"), told("w1", 1), told("w1")):
        asked.receive(each)
    found = asyncio.run(asked.complete())
    assert sorted((each.worker, each.position) for each in found) == [("w1", 0), ("w1", 1)]


def test_workers_by_themselves_are_whole() -> None:
    asked = reconnection.Reconnection(noted("w1", "w2"), 1)
    for each in (told("w2"), told("w1")):
        asked.receive(each)
    assert {each.worker for each in asyncio.run(asked.complete())} == {"w1", "w2"}
