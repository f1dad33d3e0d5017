"""What a controller makes of what policies have told and set: each event once, and whose batch it is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.config import ElasticConfig, SchedulingConfig
from elastic_ray.events import EventKind
from elastic_ray.job.supervisor import BatchChanges
from elastic_ray.job.worker_messages import WorkerMessages
from elastic_ray.worker.actor_controller_client import ActorControllerClient, HeartbeatThread
from elastic_ray.worker.messages import WorkerHeartbeat, WorkerNotice
from tests.job.planners import planner_on, report


class Parts:
    """A job's parts, as far as messages reach them."""

    def __init__(self) -> None:
        self.planner, self.choice = planner_on()
        self.seen: list[tuple[Any, str]] = []
        self.record = SimpleNamespace(told="", waits=lambda *a: None, batch_reason="for goodput", events=())
        self.events, self.reports, self.allocator = self, None, self
        self.spec = SimpleNamespace(scheduling=SchedulingConfig(), min_workers=1)
        self.heartbeats = 0
        machine = SimpleNamespace(current=None)
        self.group = SimpleNamespace(heard=lambda worker, position: True, beat=lambda message: None, machine=machine)

    def soon(self) -> None:
        self.heartbeats += 1

    def emit(self, kind: Any, text: str, *, detail: Mapping[str, Any]) -> None:
        self.seen.append((kind, text))

    def add(self, kind: Any, before: int, after: int, reason: str, *, detail: Mapping[str, Any]) -> None:
        self.seen.append((kind, reason))


def hear(parts: Parts, *messages: Any) -> None:
    intake = WorkerMessages(None, parts, None)
    for message in messages:
        asyncio.run(intake.receive(message))


def notice(text: str, **detail: Any) -> WorkerNotice:
    return WorkerNotice(worker="w1", kind=EventKind.POLICY, text=text, detail=detail)


def test_event_that_a_new_rank_0_repeats_appears_once() -> None:
    parts = Parts()
    hear(parts, notice("a", number=1), notice("b", number=2), notice("b", number=2), notice("b", number=3), notice("b"))
    assert [text for _, text in parts.seen] == ["a", "b", "b", "b"]


def test_batch_event_says_that_a_policy_has_set_it() -> None:
    parts = Parts()

    def beat(batch_size: int, held: int | None, steps: int) -> WorkerHeartbeat:
        shape = type(parts.choice)(atomic_bsz=batch_size // 2)
        told = report(2, shape, held_batch=held, total_steps=steps)
        return WorkerHeartbeat(worker="w1", report=told)

    hear(parts, beat(64, None, 20), beat(128, 128, 40), beat(256, None, 60))
    assert parts.seen == [(EventKind.BATCH, "batch 128: set by a policy"), (EventKind.BATCH, "for goodput")]


def test_why_a_batch_stays_is_no_change_of_it() -> None:
    """Programs read both sizes of each ``batch`` event; a notice has none."""
    seen: list[tuple[Any, str]] = []
    planner = SimpleNamespace(fitted=lambda model: None, pop_notice=lambda: "batch 32 stays: no signal")
    events = SimpleNamespace(emit=lambda kind, text: seen.append((kind, text)))
    parts: Any = SimpleNamespace(
        planner=planner,
        group=SimpleNamespace(machine=SimpleNamespace(current=None)),
        record=None,
        background=None,
        events=events,
    )
    asyncio.run(BatchChanges(parts)._fit(planner_on()[0].tuner.snapshot()))
    assert seen == [(EventKind.BATCH_KEPT, "batch 32 stays: no signal")]


def test_the_allocator_hears_at_once_of_a_changed_wish() -> None:
    parts, cut = Parts(), BatchChoice(atomic_bsz=32)
    heard = []
    for steps, wish in ((20, None), (40, (3, 3)), (60, (3, 3)), (80, None)):
        hear(parts, WorkerHeartbeat(worker="w1", report=report(2, cut, wish=wish, total_steps=steps)))
        heard.append(parts.heartbeats)
    assert heard == [0, 1, 1, 2]


class Link:
    """What a heartbeat goes to."""

    follows = False

    def __init__(self) -> None:
        self.wanted, self.came = threading.Event(), threading.Event()
        self.reports: list[Any] = []

    def beat(self, *, report: Any, at: Any = None, ending: bool = False) -> None:
        self.reports.append(report)
        self.came.set()

    def repeat(self) -> bool:
        return True


def test_a_controller_hears_at_once_what_may_not_wait() -> None:
    link = Link()
    group = SimpleNamespace(generation_spec=None)
    run = SimpleNamespace(group=group, rank=0, synced=True, step_report=lambda: "the account", progress=None)
    beats = HeartbeatThread(link, run, interval_s=600.0, report_s=600.0)
    try:
        link.wanted.set()
        assert link.came.wait(60.0) and link.reports == ["the account"]
    finally:
        beats.stop()
    assert link.reports == ["the account"] * 2, "the last one says how far it came"


@ray.remote(num_cpus=0)
class SlowController:
    """Takes its time over each message, as on a busy head."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def push(self, message: Any) -> None:
        await asyncio.sleep(1.0)
        self.heard.append(message.report)

    async def answer(self) -> list[str]:
        return self.heard


@pytest.mark.ray_cluster(num_cpus=1)
def test_last_heartbeat_arrives_before_the_result(ray_cluster: Any, tmp_path: Path) -> None:
    controller: Any = SlowController.remote()  # type: ignore[attr-defined]
    assert ray.get(controller.answer.remote()) == [], "its process is there"
    assignment: Any = SimpleNamespace(controller=controller, worker="w1", unit=None, storage_path=str(tmp_path))
    setup: Any = SimpleNamespace(elastic=ElasticConfig(), storage_filesystem=None, paced=False)
    link, group = ActorControllerClient(assignment, setup), SimpleNamespace(generation_spec=None)
    run: Any = SimpleNamespace(group=group, rank=0, synced=True, step_report=lambda: "the end", progress=None)
    HeartbeatThread(link, run, interval_s=600.0, report_s=600.0).stop()
    assert ray.get(controller.answer.remote()) == ["the end"]


def test_a_fickle_policy_does_not_flood_the_controller() -> None:
    link = Link()
    group = SimpleNamespace(generation_spec=None)

    def account() -> str:
        link.wanted.set()
        return "the account"

    run = SimpleNamespace(group=group, rank=0, synced=True, step_report=account, progress=None)
    link.wanted.set()
    beats = HeartbeatThread(link, run, interval_s=600.0, report_s=600.0)
    assert link.came.wait(60.0)
    time.sleep(1.0)  # were it to send at once, it would by then
    beats.stop()
    assert 2 <= len(link.reports) <= 12
