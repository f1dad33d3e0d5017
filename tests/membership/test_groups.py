"""Groups that form: through their controller, of those alone who know the job's secret, and closed to all others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ray.authentication import new_secret, sign, verify
from elastic_ray.communication.bootstrap import Bootstrap, BootstrapCall, BootstrapRefusedError, call_mac
from elastic_ray.communication.bootstrap_store import BootstrapStore
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.communication.retired_communicators import RetiredCommunicators
from elastic_ray.worker.setup import Assignment
from tests.job.specs import spec
from tests.membership.groups import LocalCaller, LocalController, local_controller, member, on_ranks

ROOT = Path(__file__).parents[2]

# -- the controller's part ---------------------------------------------------------------------------------------------

SECRET = new_secret()


def call(worker: str = "w1", generation: int = 1, secret: str = SECRET, **fields: Any) -> BootstrapCall:
    return BootstrapCall(generation=generation, worker=worker, mac=call_mac(secret, generation, worker), **fields)


def meet(*calls: BootstrapCall, members: tuple[str, ...] = ("w1", "w2")) -> list[Any]:
    """What each of these calls, made at once, is answered, or why it is refused."""

    async def run() -> list[Any]:
        bootstrap = Bootstrap(SECRET, lambda generation, worker: worker in members)
        return await asyncio.gather(*(bootstrap.meet(each) for each in calls), return_exceptions=True)

    return asyncio.run(run())


def test_who_waits_hears_all_that_is_known_at_once() -> None:
    first, second = meet(
        call("w1", tells={"a": b"1"}, wants=("a", "b"), wait_s=10.0),
        call("w2", tells={"b": b"2"}, wants=("a",), wait_s=10.0),
    )
    assert first == second == {"a": b"1", "b": b"2"}


def test_generations_do_not_hear_each_other_and_waits_end() -> None:
    begin_s = time.monotonic()
    first, second = meet(call(tells={"a": b"1"}), call("w2", generation=2, wants=("a",), wait_s=0.2))
    assert first == {"a": b"1"} and second == {} and 0.15 < time.monotonic() - begin_s < 25.0


@pytest.mark.parametrize(
    "wrong, why",
    [
        (call(secret=new_secret(), tells={"a": b"x"}), "proves nothing"),
        (
            BootstrapCall(generation=1, worker="w2", mac=call_mac(SECRET, 1, "w1"), tells={"a": b"x"}),
            "proves nothing",
        ),
        (
            BootstrapCall(generation=2, worker="w1", mac=call_mac(SECRET, 1, "w1"), tells={"a": b"x"}),
            "proves nothing",
        ),
        (BootstrapCall(generation=1, worker="w1", mac=b"", tells={"a": b"x"}), "proves nothing"),
        (call("w3", tells={"a": b"x"}), "w3 is no member of generation 1"),
        (call("w2", tells={"a": b"x"}), "w2 may not write what w1 has written"),
        (call("w2", tells={"b": b"x" * 100_000}), "too long"),
        (call("w2", tells={"b" * 1000: b""}), "too long"),
        (call("w2", tells={str(number): b"" for number in range(2000)}), "writes more than 1024 keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_strangers_and_too_large_wishes_are_refused(wrong: BootstrapCall, why: str) -> None:
    _, refused, after = meet(call(tells={"a": b"1"}), wrong, call(wants=("a",)))
    assert isinstance(refused, BootstrapRefusedError) and why in str(refused)
    assert after["a"] == b"1"


def test_old_generations_are_forgotten_and_their_waiters_let_go() -> None:
    waiting, *_, late = meet(
        call(wants=("never",), wait_s=30.0),
        *(call(generation=number, tells={"a": b"1"}) for number in range(2, 8)),
        call(wants=("a",)),
    )
    assert isinstance(waiting, BootstrapRefusedError) and "generation 1 was abandoned" in str(waiting)
    assert isinstance(late, BootstrapRefusedError) and "generation 1 is over" in str(late)


def test_a_proof_serves_for_nothing_else() -> None:
    mac = sign(SECRET, "peer", 1, 23)
    assert verify(mac, SECRET, "peer", 1, 23)
    assert not any(verify(mac, SECRET, *facts) for facts in [("peer", 12, 3), ("peer", 1, 2, 3), ("peer1", 23)])
    assert not verify(mac, new_secret(), "peer", 1, 23)
    with pytest.raises(ValueError, match="secret must not be empty"):
        sign("", "peer")


def test_secret_is_never_shown_every_job_has_its_own() -> None:
    one, other = spec(), spec()
    assert one.secret != other.secret and len(one.secret) == 64
    assignment = Assignment(
        worker="w1", job="j", train_loop=b"", storage_path="", node="n", controller=None, secret=one.secret
    )
    shown = repr(one) + repr(assignment) + repr(call(secret=one.secret))
    assert one.secret not in shown and repr(call_mac(one.secret, 1, "w1")) not in shown


# -- the members' part -------------------------------------------------------------------------------------------------


def add_up(communicator: Communicator) -> Any:
    tensor = torch.full((3,), float(communicator.rank + 1))
    communicator.wait(communicator.all_reduce(tensor))
    return tensor.tolist()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_find_each_other_through_calls(world: int) -> None:
    assert on_ranks(world, add_up) == [[world * (world + 1) / 2] * 3] * world


def test_forming_takes_three_calls_of_each_rank() -> None:
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(3) as pool:
        formed = list(pool.map(lambda rank: member(controller, rank, 3), range(3)))
        assert controller.calls == 9 and [each.rank for each in formed] == [0, 1, 2]


def test_a_group_with_an_unawaited_operation_can_be_dropped() -> None:
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        mine, theirs = pool.map(lambda rank: member(controller, rank, 2), range(2))
    work = mine.all_reduce(torch.ones(3), timeout_s=1000.0)
    mine.keep_for(work)
    retired = RetiredCommunicators()
    begin_s = time.monotonic()
    retired.retire(mine)
    retired.drop_healthy(10.0)
    assert time.monotonic() - begin_s < 9.0 and not work.is_completed()
    theirs.close()  # which ends the operation
    deadline = time.monotonic() + 30.0
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert work.is_completed()


THREADS = """
import concurrent.futures, gc, os, time
from elastic_ray.communication.retired_communicators import RetiredCommunicators
from tests.membership.groups import local_controller, member

def threads():
    return len(os.listdir("/proc/self/task"))

gc.disable()
retired, before = RetiredCommunicators(), threads()
for generation in (1, 2, 3):
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda rank: member(controller, rank, 3, generation=generation), range(3)))
    assert threads() > before + 6
    for group in groups:
        retired.retire(group)
    retired.drop_healthy(10.0)
until_s = time.monotonic() + 60.0
while threads() > before + 1:
    assert time.monotonic() < until_s, threads()
    time.sleep(0.01)
print("GONE")
"""


def test_a_retired_group_takes_its_threads_nobody_waits() -> None:
    """In a process of its own: others' groups end here, too."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert done.stdout.split()[-1:] == ["GONE"], done.stderr


def test_a_group_out_of_use_says_so() -> None:
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        mine, theirs = pool.map(lambda rank: member(controller, rank, 2), range(2))
    retired = RetiredCommunicators()
    for each in (mine, theirs):
        retired.retire(each)
    retired.drop_healthy(10.0)
    for group in (mine, mine.gradients):
        with pytest.raises(CommunicationFailedError, match="called off"):
            group.all_reduce(torch.ones(3))


@pytest.mark.thorough
def test_broken_group_stays_until_its_last_operation_timed_out() -> None:
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        mine, theirs = pool.map(lambda rank: member(controller, rank, 2, timeout_s=3.0), range(2))
    retired = RetiredCommunicators()
    mine.mark_broken()
    retired.retire(mine)
    retired.drop_healthy(10.0)
    assert mine._gloo is not None
    until_s = time.monotonic() + 30.0
    while mine._gloo is not None:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    theirs.close()


def test_a_rank_that_never_comes_ends_at_its_deadline() -> None:
    begin_s = time.monotonic()
    with (
        local_controller() as controller,
        pytest.raises(CommunicationFailedError, match=r"timed out waiting for .*here/1"),
    ):
        member(controller, 0, 2, form_s=0.5)
    assert 0.4 < time.monotonic() - begin_s < 10.0


def test_a_member_that_the_controller_refuses_says_so() -> None:
    refused = pytest.raises(CommunicationFailedError, match="w2 is no member of generation 1")
    with local_controller(is_member=lambda generation, worker: worker == "w1") as controller, refused:
        member(controller, 1, 2)


def test_a_peer_without_the_secret_is_none() -> None:
    def form(rank: int) -> Any:
        try:
            return member(controller, rank, 2, secret=[controller.secret, new_secret()][rank])
        except CommunicationFailedError as error:
            return str(error)

    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(form, range(2)))
    assert [f"rank {1 - rank} cannot prove that it is a worker of this job" in outcomes[rank] for rank in range(2)]


class Held(LocalCaller):
    """A member that tells the others where it listens, but hears of them only when it is let go."""

    def __init__(self, controller: LocalController, worker: str, go: threading.Event) -> None:
        super().__init__(controller, worker, 1)
        self._go, self._asked = go, 0
        self.listens: dict[str, bytes] = {}

    def ask(self, keys: tuple[str, ...], wait_s: float, tells: Mapping[str, bytes]) -> Mapping[str, bytes]:
        self._asked += 1
        if self._asked == 2:  # all are here; now they tell each other where they listen
            self.notify(tells)
            self.listens.update(tells)
            assert self._go.wait(20.0)
        return super().ask(keys, wait_s, tells)


def port_in(told: bytes) -> int:
    """The port in what gloo tells: a socket's address of 127.0.0.1, as the kernel has it."""
    at = told.index(socket.inet_aton("127.0.0.1"))
    return int.from_bytes(told[at - 2 : at], "big")


def test_a_stranger_in_a_peers_place_is_found_out() -> None:
    """It connects to every rank that listens, with every number that a peer might have, before any peer does."""
    go = threading.Event()

    def form(rank: int) -> Any:
        fields = {"timeout_s": 20.0, "form_timeout_s": 3.0, "host": "127.0.0.1", "secret": controller.secret}
        try:
            store = BootstrapStore(callers[rank], 3.0, rank=rank, world_size=2)
            return Communicator(store, "generation/1", rank=rank, world_size=2, **fields)
        except CommunicationFailedError as error:
            return str(error)

    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        callers = [Held(controller, f"w{rank + 1}", go) for rank in range(2)]
        works = [pool.submit(form, rank) for rank in range(2)]
        while not all(caller.listens for caller in callers):
            time.sleep(0.01)
        strangers = []
        for caller in callers:
            for number in range(4):
                stranger = socket.create_connection(("127.0.0.1", port_in(next(iter(caller.listens.values())))), 5.0)
                stranger.sendall(number.to_bytes(8, "little"))
                strangers.append(stranger)
        time.sleep(0.3)  # gloo reads what they sent
        go.set()
        begin_s = time.monotonic()
        outcomes = [work.result(30) for work in works]
        assert all(isinstance(outcome, str) for outcome in outcomes), outcomes
        assert time.monotonic() - begin_s < 25.0
        second = list(pool.map(lambda rank: add_up(member(controller, rank, 2, generation=2)), range(2)))
        assert second == [[3.0] * 3] * 2
        for stranger in strangers:
            stranger.close()


def listening_ports() -> set[int]:
    """TCP ports on which this process listens."""
    import psutil

    return {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}


def test_no_process_can_connect_to_a_formed_group() -> None:
    before = listening_ports()
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        formed = list(pool.map(lambda rank: member(controller, rank, 2), range(2)))
        opened = listening_ports() - before
        assert len(opened) == 2
        for port in opened:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.3)
        assert list(pool.map(add_up, formed)) == [[3.0] * 3] * 2


def test_sockets_opened_before_all_have_come_are_others() -> None:
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        forming = pool.submit(member, controller, 0, 2)
        while not controller.calls:
            time.sleep(1e-3)
        other, accepted = socket.socketpair()
        with other, accepted:
            pool.submit(member, controller, 1, 2).result()
            forming.result().connections.shut_down()
            other.sendall(b"hears")
            assert accepted.recv(5) == b"hears"


def test_ranks_that_send_long_after_forming_find_each_other() -> None:
    """NCCL connects a pair of ranks through the store when they first send to each other."""
    with local_controller() as controller:
        first, second = (
            BootstrapStore(LocalCaller(controller, f"w{rank + 1}", 1), 0.5, rank=rank, world_size=2) for rank in (0, 1)
        )
        for store in (first, second):
            store.publish_at_once()
        time.sleep(0.6)  # longer than a group may take to form
        first.set("0:1", b"an id")
        with pytest.raises(RuntimeError, match="timed out waiting for 0:1"):
            second.get("0:1")
        second.stay_open()
        assert second.get("0:1") == b"an id"
        begin_s = time.monotonic()
        with pytest.raises(RuntimeError, match="timed out waiting for 1:2"):
            second.get("1:2")
        assert time.monotonic() - begin_s < 20.0


def test_what_is_set_is_told_also_without_waiting() -> None:
    """A rank that hears late has heard with one answer what the others told after it."""
    with local_controller() as controller:
        first, second = (
            BootstrapStore(LocalCaller(controller, f"w{rank + 1}", 1), 5.0, rank=rank, world_size=2) for rank in (0, 1)
        )
        LocalCaller(controller, "w1", 1).notify({"a/0": b"1", "b/0": b"2"})
        assert second.get("a/0") == b"1"
        second.set("b/1", b"3")
        assert second.get("b/1") == b"3"
        assert second.get("b/0") == b"2"
        assert first.get("b/1") == b"3"


def test_a_rank_may_have_hundreds_of_peers() -> None:
    """NCCL has the first of each pair tell something."""
    with local_controller() as controller:
        caller = LocalCaller(controller, "w1", 1)
        caller.notify({f"0:{peer}": b"an id" for peer in range(1, 500)})
        assert len(caller.ask(("0:499",), 5.0, {})) == 499
