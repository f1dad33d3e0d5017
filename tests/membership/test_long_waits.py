"""Long waits for messages between two ranks, which a rank announces: which of them are named as a disagreement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.announcer import Announcer
from elastic_ray.consensus.intents import Announced, Intent, RanksDisagreeError
from tests.membership.groups import on_ranks

Act = Callable[[Announcer, int], None]


def wait_long(announcer: Announcer, told: tuple[Announced, int], *, wait_s: float = 0.1) -> None:
    """Wait for a message, as seen from the announcer: it is asked to speak again and again."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        announcer.speak_in_transfer(*told, 0, -math.inf)
        time.sleep(2e-3)  # until the others speak, too


def vote(announcer: Announcer) -> None:
    announcer.start(Announced(Intent.EDGE, 1), 0)
    announcer.agree()
    announcer.done()


def on_announcers(act: Act) -> list[Any]:
    """Each rank's exception, or None."""

    def work(communicator: Communicator) -> None:
        act(Announcer(communicator), communicator.rank)

    return on_ranks(2, work)


def test_an_outdated_wait_is_no_disagreement_after_many_messages() -> None:
    def act(announcer: Announcer, rank: int) -> None:
        told = announcer.start_transfer(1 - rank, 0, received=bool(rank))
        if rank:
            announcer.speak_in_transfer(*told, 0, -math.inf)
        for _ in range(200):
            announcer.start_transfer(1 - rank, 0, received=bool(rank))
        vote(announcer)

    assert on_announcers(act) == [None, None]


def test_a_large_message_on_its_way_is_waited_for() -> None:
    def act(announcer: Announcer, rank: int) -> None:
        if not rank:
            announcer.start_transfer(1, 0, received=False)
            wait_long(announcer, announcer.start_transfer(1, 7, received=True))
        else:
            wait_long(announcer, announcer.start_transfer(0, 0, received=True))
            announcer.start_transfer(0, 7, received=False)
        vote(announcer)

    assert on_announcers(act) == [None, None]


@pytest.mark.parametrize("received", [True, False])
def test_two_ranks_that_wait_for_each_other_are_named(received: bool) -> None:
    def act(announcer: Announcer, rank: int) -> None:
        wait_long(announcer, announcer.start_transfer(1 - rank, rank, received=received), wait_s=20)

    for error in on_announcers(act):
        assert isinstance(error, RanksDisagreeError)
        assert "rank 0 waits to" in str(error) and "rank 1 waits to" in str(error)
