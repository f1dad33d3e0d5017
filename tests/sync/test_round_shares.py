"""Counts of a round's steps, between two ranks of one process, through a wire that can be slow or silent."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.communication.rank_server import TOKEN_BYTES
from elastic_ray.communication.round_shares import RoundShares
from elastic_ray.standalone.session import session_after, standalone_session

DELAY_S, STEP_S = 0.01, 0.15
OWN = 2  # requests for one own step: how far the others are, and to count it


class Wire:
    """Passes requests and answers on, each after a while; requests after the first ``most`` once they are released."""

    def __init__(self, host: str, port: int, delay_s: float = DELAY_S) -> None:
        self.asked, self.most, self._delay_s = 0, math.inf, delay_s
        self.released = threading.Event()
        self._listener = socket.create_server((host, 0))
        self.port = self._listener.getsockname()[1]
        self._to = host, port
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._to)
        far.sendall(near.recv(TOKEN_BYTES, socket.MSG_WAITALL))
        threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
        self._pass(far, near, False)

    def _pass(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        try:
            while content := source.recv(1024):
                self.asked += asks
                time.sleep(self._delay_s)  # the wire's latency
                if asks and self.asked > self.most:
                    self.released.wait()
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


class Alike:
    """What ranks need of a communicator."""

    broken = False

    def __init__(self, rank: int, ranks: int, told: list[bytes], timeout_s: float = 10.0) -> None:
        self.rank, self.world_size, self.timeout_s, self.host = rank, ranks, timeout_s, "127.0.0.1"
        self._told = told

    def broadcast_bytes(self, content: bytes, root: int) -> bytes:
        if content:
            self._told.append(content)
        return self._told[-1]

    def mark_broken(self) -> None:
        self.broken = True


Pair = tuple[RoundShares, RoundShares, Wire]


def enter(first: RoundShares, second: RoundShares, timeout_s: float = 10.0) -> Wire:
    """Both enter a new group; the second one through a wire."""
    told: list[bytes] = []
    first.enter(Alike(0, 2, told, timeout_s), wanted=True, called_off=lambda: False)
    host, port, token = json.loads(told[0])
    wire = Wire(host, port)
    told.append(json.dumps([host, wire.port, token]).encode())
    second.enter(Alike(1, 2, told, timeout_s), wanted=True, called_off=lambda: False)
    return wire


@pytest.fixture
def pair() -> Iterator[Pair]:
    first, second = RoundShares(), RoundShares()
    yield first, second, enter(first, second)
    second.close()
    first.close()


def ask_ahead(shares: RoundShares) -> None:
    """Make the rank ask for its step 2 while it makes step 1, for which it has sent `OWN` requests."""
    shares.start_round(0, 4)
    time.sleep(STEP_S)  # of step 0
    assert shares.is_own(1)


def fails(call: Callable[[], Any]) -> float:
    """The time after which a call fails."""
    since_s = time.monotonic()
    with pytest.raises(CommunicationFailedError):
        call()
    return time.monotonic() - since_s


def test_a_round_left_early_counts_no_later_step(pair: Pair) -> None:
    _, second, _ = pair
    ask_ahead(second)
    second.end_round()  # as after a break
    second.start_round(4, 4)
    time.sleep(STEP_S)  # longer than until a request was to be made
    assert [second.is_own(step) for step in (1, 2, 3)] == [True] * 3


def test_a_request_in_progress_belongs_to_its_round(pair: Pair) -> None:
    first, second, _ = pair
    ask_ahead(second)
    time.sleep(STEP_S - 2 * DELAY_S)  # it is being asked for
    second.end_round()
    second.start_round(4, 4)
    first.start_round(4, 4)
    assert [second.is_own(step) for step in (1, 2, 3)] == [True] * 3


def test_a_late_request_of_an_earlier_round_counts_nothing(pair: Pair) -> None:
    first, second, wire = pair
    wire.most = OWN
    ask_ahead(second)
    first.start_round(4, 4)
    assert first.is_own(1)  # another rank is in the next round
    wire.released.set()
    assert not second.is_own(2)
    second.end_round()
    second.start_round(4, 4)
    assert [second.is_own(step) for step in (1, 2, 3)] == [True] * 3


def test_a_silent_rank_0_is_given_up() -> None:
    first, second = RoundShares(), RoundShares()
    wire = enter(first, second, timeout_s=1.5)
    second.start_round(0, 4)
    wire.most = 0
    assert 1.0 < fails(lambda: second.is_own(1)) < 20.0
    assert fails(lambda: second.of_another()) < 1.5, "what comes later answers no other request"
    second.close()
    first.close()


def test_a_lost_groups_request_stays_with_it(pair: Pair) -> None:
    first, second, wire = pair
    wire.most = OWN
    ask_ahead(second)
    while wire.asked == OWN:  # until the request for step 2 waits for its answer
        time.sleep(0.005)
    since_s = time.monotonic()
    second.end_round(lost=True)
    wire = enter(first, second)
    assert time.monotonic() - since_s < 9.0, "it waits for the lost group"
    second.start_round(0, 4)
    time.sleep(1.2)  # a while in which the request would look whether the group is wanted
    assert [second.is_own(step) for step in (1, 2, 3)] == [True] * 3
    assert first.stands


def named() -> int:
    return sum("round-shares" in thread.name for thread in threading.enumerate())


def test_nothing_is_left_of_a_closed_group() -> None:
    before = named()
    told: list[bytes] = []
    shares = RoundShares()
    shares.enter(Alike(0, 1, told), wanted=True, called_off=lambda: False)
    shares.close()
    deadline_s = time.monotonic() + 30.0
    while named() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert named() <= before, "threads of tests before may have ended meanwhile"
    host, port, _ = json.loads(told[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=1.0)


def test_nothing_is_left_of_a_run_that_is_replaced() -> None:
    told: list[bytes] = []
    earlier = standalone_session()
    earlier.run.shares.enter(Alike(0, 1, told), wanted=True, called_off=lambda: False)
    after = session_after(earlier)
    assert not earlier.run.shares.stands
    after.membership.close(broken=False)


class Fails(Alike):
    def broadcast_bytes(self, content: bytes, root: int) -> bytes:
        super().broadcast_bytes(content, root)
        raise CommunicationFailedError("a peer is gone")


def test_nothing_is_left_of_a_refused_group() -> None:
    told: list[bytes] = []
    shares = RoundShares()
    fails(lambda: shares.enter(Fails(0, 2, told), wanted=True, called_off=lambda: False))
    host, port, _ = json.loads(told[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=1.0)
    assert not shares.stands


def test_the_port_is_closed_once_all_ranks_are_there(pair: Pair) -> None:
    told: list[bytes] = []
    shares = RoundShares()
    shares.enter(Alike(0, 1, told), wanted=True, called_off=lambda: False)
    shares.start_round(0, 2)
    assert shares.is_own(1), "the token is known by then"
    host, port, _ = json.loads(told[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=1.0)
    shares.close()


def test_strangers_do_not_keep_a_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.communication.rank_server._TOKEN_S", 1.5)
    told: list[bytes] = []
    first, second = RoundShares(), RoundShares()
    first.enter(Alike(0, 2, told), wanted=True, called_off=lambda: False)
    host, port, _ = json.loads(told[0])
    before = threading.active_count()
    strangers = [socket.create_connection((host, port)) for _ in range(10)]
    strangers[0].sendall(b"x" * 16)
    strangers[1].sendall(b"x")
    time.sleep(0.3)  # less than they have
    assert threading.active_count() - before <= 2 * 2 + 1, "not more are held than twice as many as there are ranks"
    second.enter(Alike(1, 2, told), wanted=True, called_off=lambda: False)
    second.start_round(0, 2)
    assert second.is_own(1)
    for each in strangers:
        each.settimeout(30.0)
        with contextlib.suppress(ConnectionResetError):
            assert each.recv(1) == b""
        each.close()
    second.close()
    first.close()
