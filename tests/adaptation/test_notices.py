"""What a controller makes of what policies have told and set: each event once, and whose batch it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from elastic_ray.events import EventKind
from elastic_ray.job.worker_messages import WorkerMessages
from elastic_ray.worker.messages import WorkerHeartbeat, WorkerNotice
from tests.job.test_allocator_view import planner_on, report


class Parts:
    """A job's parts, as far as messages reach them."""

    def __init__(self) -> None:
        self.planner, self.choice = planner_on()
        self.seen: list[tuple[Any, str]] = []
        self.record = SimpleNamespace(user_told=lambda text: None, waits=lambda *a: None, batch_reason="for goodput")
        self.events, self.reports = self, None
        machine = SimpleNamespace(current=None)
        self.group = SimpleNamespace(heard=lambda worker: True, beat=lambda message: None, machine=machine)

    def note(self, kind: Any, text: str, *, detail: Mapping[str, Any]) -> None:
        self.seen.append((kind, text))

    def add(self, kind: Any, before: int, after: int, reason: str, *, detail: Mapping[str, Any]) -> None:
        self.seen.append((kind, reason))


def hear(parts: Parts, *messages: Any) -> None:
    intake = WorkerMessages(None, parts)  # type: ignore[arg-type]
    for message in messages:
        asyncio.run(intake.hear(message))


def notice(text: str, **detail: Any) -> WorkerNotice:
    return WorkerNotice(worker="w1", kind=EventKind.POLICY, text=text, detail=detail)


def test_an_event_that_a_new_rank_0_repeats_is_there_once() -> None:
    parts = Parts()
    hear(parts, notice("a", number=1), notice("b", number=2), notice("b", number=2), notice("b", number=3), notice("b"))
    assert [text for _, text in parts.seen] == ["a", "b", "b", "b"]


def test_the_event_of_a_batch_says_that_a_policy_has_set_it() -> None:
    parts = Parts()

    def beat(batch_size: int, held: int | None, steps: int) -> WorkerHeartbeat:
        shape = type(parts.choice)(atomic_bsz=batch_size // 2)
        told = report(2, shape, held_batch=held, total_steps=steps)
        return WorkerHeartbeat(worker="w1", report=told)

    hear(parts, beat(64, None, 20), beat(128, 128, 40), beat(256, None, 60))
    assert parts.seen == [(EventKind.BATCH, "batch 128: set by a policy"), (EventKind.BATCH, "for goodput")]
