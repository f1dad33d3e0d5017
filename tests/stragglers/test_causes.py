"""Causes of stragglers beyond their place and their data: memory and network, from made measures and real sockets."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

import pytest

from elastic_ray.communication.connections import Connections
from elastic_ray.monitoring.monitoring import _group_used, _host_used, major_faults, memory_used
from elastic_ray.stragglers.detection import SendTrace, StragglerConfig
from elastic_ray.stragglers.watch import StragglerWatch
from tests.stragglers.group import Group

STEP_S = 16 * 0.01  # of a healthy worker


@pytest.mark.parametrize(
    ("memory", "cause"),
    (
        ({"w3": {"major_faults": 2000.0}}, "memory"),  # 0.2 s of the 0.32 s that it takes longer
        ({"w3": {"major_faults": 100.0}}, "worker"),
        ({"w3": {"memory_used": 0.97}}, "memory"),
        ({"w3": {"memory_used": 0.9}}, "worker"),
        ({f"w{n}": {"memory_used": 0.99, "major_faults": 2000.0} for n in range(1, 5)}, "worker"),
    ),
)
def test_a_slow_worker_that_lacks_memory_is_told(memory: dict[str, dict[str, float]], cause: str) -> None:
    group = Group()
    group.slow, group.memory = {"w3": 3.0}, memory
    group.step(20)
    assert [(each["worker"], each["cause"]) for each in group.told] == [("w3", cause)]


def test_lack_of_memory_goes_before_node_and_after_data() -> None:
    group = Group(nodes=("a", "a", "a", "b", "b"))
    group.slow = {"w4": 3.0, "w5": 3.0}
    group.memory = {worker: {"memory_used": 0.99} for worker in ("w4", "w5")}
    group.step(20)
    assert [each["cause"] for each in group.told] == ["memory", "memory"]
    data = Group()
    data.data_s, data.memory = {"w1": 0.5}, {"w1": {"memory_used": 0.99}}
    data.step(20)
    assert [each["cause"] for each in data.told] == ["data"]


def test_full_memory_alone_makes_no_straggler() -> None:
    group = Group()
    group.memory = {"w2": {"memory_used": 1.0, "major_faults": 1e4}}
    group.step(100)
    assert not group.told


def slow_sender(seconds: float = 0.3) -> Group:
    """A group whose second worker holds up every reduction."""
    group = Group(StragglerConfig(response="replace", patience_s=1.0))
    group.network_s = seconds
    group.sending_s = {"w1": 0.02, "w2": seconds, "w3": 0.03, "w4": 0.02}
    return group


def test_a_slow_sender_is_told_and_nothing_else_happens() -> None:
    group = slow_sender()
    group.step(60)  # of half a second each
    assert [(each["state"], each["worker"], each["rank"], each["cause"]) for each in group.told] == [
        ("slow", "w2", 1, "network")
    ]
    assert group.told[0]["ratio"] == pytest.approx(15.0) and "to send as much" in group.told[0]["text"]
    assert group.watch.slow == () and group.watch.weights is None
    assert [each.worker for each in group.watch.senders] == ["w2"] and not group.watch.senders[0].replace
    group.network_s, group.sending_s = 0.02, dict.fromkeys(group.sending_s, 0.02)
    group.step(100)
    assert group.states == ["slow", "recovered"] and group.watch.senders == ()


def test_network_that_is_slow_for_all_is_nobodys_fault() -> None:
    group = Group()
    group.network_s, group.sending_s = 0.3, {"w1": 0.3, "w2": 0.28, "w3": 0.2, "w4": 0.25}
    group.step(200)
    assert not group.told


def test_one_that_sends_more_is_not_slow_for_that() -> None:
    trace = SendTrace()
    for _ in range(20):
        trace = trace.add(sending_s=[0.1, 0.4, 0.1], mib=[10.0, 40.0, 10.0], seconds=1.0)
    assert trace.slow == () and trace.ratios == pytest.approx((1.0, 1.0, 1.0))


def test_short_bursts_are_no_slow_network_nor_slow_senders() -> None:
    group = slow_sender()
    for _ in range(10):
        group.sending_s["w2"] = 0.3
        group.step(10)  # five looks
        group.sending_s["w2"] = 0.02
        group.step(20)
    assert not group.told
    both = slow_sender()
    both.slow = {"w2": 3.0}
    both.step(100)
    assert "network" not in {each["cause"] for each in both.told}


def test_what_is_known_of_senders_travels() -> None:
    group, other = slow_sender(), slow_sender()
    group.step(60)
    state = group.watch.capture()
    copy = StragglerWatch(
        StragglerConfig(response="tell"),
        members=lambda: other.members,  # type: ignore[return-value]
        measured=lambda: other.measured,
        tell=lambda text, detail: None,
    )
    copy.restore(state)
    assert copy.capture() == state and copy.senders == group.watch.senders


def test_memory_is_read_as_the_kernel_tells_it(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 250 kB\n")
    assert _host_used(tmp_path) == 0.75 and _host_used(tmp_path / "none") == 0.0
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job/worker\n")
    group = tmp_path / "job" / "worker"
    group.mkdir(parents=True)
    assert _group_used(tmp_path, tmp_path) == 0.0
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("950\n")
    (group / "memory.stat").write_text("anon 700\ninactive_file 150\n")
    assert _group_used(tmp_path, tmp_path) == pytest.approx(0.8)
    (group / "memory.max").write_text("max\n")
    assert _group_used(tmp_path, tmp_path) == 0.0
    assert 0.0 <= memory_used() <= 1.0 and major_faults() >= 0


def test_without_proc_no_connection_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("elastic_ray.communication.connections._DESCRIPTORS", str(tmp_path / "fd"))
    assert Connections.of_process() == [] and Connections().sending_s() == 0.0


def test_a_connection_sends_while_its_peer_has_room() -> None:
    """Over loopback what is sent is acknowledged at once; what a receiver has no room for does not count."""
    before = set(Connections.of_process())
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        with far:
            found = set(Connections.of_process()) - before
            assert {each.fileno() for each in (listener, near, far)} == {descriptor for descriptor, _ in found}
            connections = Connections(found)
            near.setblocking(False)
            try:
                while near.send(bytes(1 << 16)):
                    pass
            except BlockingIOError:
                pass
            began_s = time.monotonic()
            while time.monotonic() - began_s < 0.3:
                time.sleep(0.05)
            told = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            busy_us, full_us = struct.unpack_from("=QQ", told, 168)
            assert busy_us > 200_000 and full_us > 200_000, "the kernel tells it where it is looked for"
            assert connections.sending_s() == pytest.approx((busy_us - full_us) * 1e-6, abs=0.05)
            descriptor = near.fileno()
    with open(os.devnull, "rb") as other:
        assert connections.sending_s() == 0.0, (descriptor, other.fileno())
