"""A controller's heartbeats to an allocator that is slow to answer: no Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ray.job import allocator_client
from elastic_ray.job.allocator_client import AllocatorClient
from placement.allocator.events import HeartbeatReply
from placement.cluster.jobs import Bill, JobView
from placement.versions import PROTOCOL, Spoken, VersionError
from tests.job.specs import spec
from tests.placement.views import view


class Busy:
    """An allocator that answers when it is told to."""

    def __init__(self) -> None:
        self.views: list[JobView] = []
        self.asked: list[asyncio.Future[HeartbeatReply]] = []
        self.heartbeat = SimpleNamespace(remote=self._heartbeat)
        self.speak = SimpleNamespace(remote=self._speak)

    async def _speak(self, theirs: Spoken) -> None:
        self.heard = theirs

    def _heartbeat(self, seen: JobView, *_: Any) -> asyncio.Future[HeartbeatReply]:
        self.views.append(seen)
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]


def test_nothing_is_resent_to_an_allocator_yet_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, heard = Busy(), list[HeartbeatReply]()
    monkeypatch.setattr(allocator_client, "find_allocator", lambda: busy)
    monkeypatch.setattr(allocator_client, "_SLOW_S", 0.02)

    async def beat() -> None:
        client = AllocatorClient(spec(), None, lambda: view("a"), heard.append)
        for tick in range(20):
            client.tick(2.0 * tick)
            await asyncio.sleep(0.01)
        assert len(busy.asked) == 1
        busy.asked[0].set_result(HeartbeatReply(priors={}, knows_root=True, bill=Bill(usd=2.0, attained_s=3.0)))
        await asyncio.sleep(0.01)
        client.tick(100.0)
        await asyncio.sleep(0.01)
        assert len(busy.asked) == 2 and len(heard) == 1
        assert [said.bill for said in busy.views] == [None, Bill(usd=2.0, attained_s=3.0)], "for the next allocator"

    asyncio.run(beat())


def test_allocator_of_another_release_is_told_nothing_users_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Newer(Busy):
        async def _speak(self, theirs: Spoken) -> None:
            raise VersionError(f"got {theirs.protocol} and 99")

    newer, heard = Newer(), list[HeartbeatReply]()
    monkeypatch.setattr(allocator_client, "find_allocator", lambda: newer)

    async def beat() -> None:
        client = AllocatorClient(spec(), None, lambda: view("a"), heard.append)
        for tick in range(3):
            client.tick(2.0 * tick)
            await asyncio.sleep(0.05)

    asyncio.run(beat())
    assert not newer.asked and {said.note for said in heard} == {f"got {PROTOCOL} and 99"}
