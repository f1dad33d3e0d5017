"""Browsers that read, and browsers that do not."""

from __future__ import annotations

import asyncio

import pytest

from elastic_ray.observe.page.feed import Feed, TooManyClientsError


def test_every_browser_gets_every_message_in_order() -> None:
    async def run() -> list[list[bytes | None]]:
        feed = Feed()
        clients = [feed.join(), feed.join()]
        for n in range(3):
            feed.notify(b"%d" % n)
        return [[await client.next(1.0) for _ in range(3)] for client in clients]

    assert asyncio.run(run()) == [[b"0", b"1", b"2"]] * 2


def test_one_that_does_not_read_is_given_up() -> None:
    async def run() -> None:
        feed = Feed(most_waiting=4)
        slow, fast = feed.join(), feed.join()
        for n in range(10):
            feed.notify(b"%d" % n)
            assert await fast.next(1.0) == b"%d" % n
        assert slow.dropped and not fast.dropped and feed.clients == 1
        assert slow.waiting_bytes == 0 and await slow.next(1.0) is None
        await asyncio.wait_for(slow.until_dropped(), 1.0)

    asyncio.run(run())


def test_bytes_that_wait_are_bounded_too() -> None:
    async def run() -> None:
        feed = Feed(most_waiting=1000, most_bytes=100)
        slow = feed.join()
        feed.notify(b"x" * 60)
        assert slow.waiting_bytes == 60
        feed.notify(b"x" * 60)
        assert slow.dropped and slow.waiting_bytes == 0

    asyncio.run(run())


def test_there_are_no_more_browsers_than_are_served() -> None:
    async def run() -> None:
        feed = Feed(most_clients=2)
        first = feed.join()
        feed.join()
        with pytest.raises(TooManyClientsError, match="2 browsers have this page open already"):
            feed.join()
        feed.leave(first)
        feed.join()
        assert await first.next(0.01) == b""  # nothing came: time for a sign of life
        feed.close()
        assert feed.clients == 0

    asyncio.run(run())
