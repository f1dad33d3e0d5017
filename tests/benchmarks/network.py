"""Where the ranks of a benchmark run: on loopback, or each in a network namespace behind a link of 1 Gbit/s.

Links may delay: their packets go through this process, for not every kernel has netem.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

_BRIDGE_ADDRESS = "10.231.7.254"
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001  # of linux/if_tun.h
_LARGEST_PACKET = 65000


class Network(Protocol):
    """Where ranks run."""

    name: str

    def address(self, rank: int) -> str:
        """The rank's address."""

    def interface(self, rank: int) -> str:
        """Its network interface."""

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """A command, as it is to be started for this rank."""

    @property
    def ranks_on_a_node(self) -> int:
        """How many share one; 0 for all."""


class Loopback:
    """All ranks on this machine."""

    name = "loopback"
    ranks_on_a_node = 0

    def address(self, rank: int) -> str:
        """Loopback's."""
        return "127.0.0.1"

    def interface(self, rank: int) -> str:
        """Loopback."""
        return "lo"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command itself."""
        return list(command)


class Namespaces:
    """Each rank in a namespace of its own, all on one bridge. Use :func:`namespaces`."""

    name = "1 Gbit/s"
    ranks_on_a_node = 1

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def address(self, rank: int) -> str:
        """Of the rank's end of its link."""
        return f"10.231.7.{rank + 1}"

    def interface(self, rank: int) -> str:
        """The rank's end of its link."""
        return f"{self.prefix}i{rank}"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command inside the rank's namespace."""
        return ["ip", "netns", "exec", f"{self.prefix}{rank}", *command]


class Nodes(Namespaces):
    """Namespaces as nodes of two ranks each."""

    name = "two nodes, 1 Gbit/s"
    ranks_on_a_node = 2

    def address(self, rank: int) -> str:
        """Of the node."""
        return super().address(rank // self.ranks_on_a_node)

    def interface(self, rank: int) -> str:
        """The node's end of its link."""
        return super().interface(rank // self.ranks_on_a_node)

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command on the rank's node."""
        return super().command(rank // self.ranks_on_a_node, command)


def may_make_namespaces() -> bool:
    """Whether this process may make network namespaces and shape their links."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"erprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


@contextlib.contextmanager
def namespaces(world: int, *, rate: str = "1gbit") -> Iterator[Namespaces]:
    """Namespaces for ``world`` ranks with links of ``rate`` both ways; gone afterwards."""
    prefix = f"er{os.getpid() % 10000}n"
    network, bridge = Namespaces(prefix), f"{prefix}b"
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip addr add {_BRIDGE_ADDRESS}/24 dev {bridge}")
        _run(f"ip link set {bridge} up")
        for rank in range(world):
            inside, outside, name = network.interface(rank), f"{prefix}o{rank}", f"{prefix}{rank}"
            _run(f"ip netns add {name}")
            _run(f"ip link add {inside} type veth peer name {outside}")
            _run(f"ip link set {inside} netns {name}")
            _run(f"ip link set {outside} master {bridge} up")
            _run(f"ip netns exec {name} ip addr add {network.address(rank)}/24 dev {inside}")
            _run(f"ip netns exec {name} ip link set lo up")
            _run(f"ip netns exec {name} ip link set {inside} up")
            _run(f"ip netns exec {name} tc qdisc add dev {inside} {_shape(rate)}")
            _run(f"tc qdisc add dev {outside} {_shape(rate)}")
        yield network
    finally:
        for rank in range(world):
            subprocess.run(["ip", "netns", "del", f"{prefix}{rank}"], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"{prefix}o{rank}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


@contextlib.contextmanager
def far_namespaces(world: int, *, delay_s: float, rate: str = "1gbit") -> Iterator[Namespaces]:
    """Namespaces that send at ``rate``, and whose packets arrive ``delay_s`` later; gone afterwards.

    Each has one end of a tunnel, the other end is a file of this process.
    """
    prefix = f"er{os.getpid() % 10000}n"
    network, files, stopped = Namespaces(prefix), list[int](), threading.Event()
    thread = threading.Thread(target=_deliver, args=(files, delay_s, stopped), daemon=True)
    try:
        for rank in range(world):
            device, name = network.interface(rank), f"{prefix}{rank}"
            files.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(files[-1], _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN_NO_PI))
            _run(f"ip netns add {name}")
            _run(f"ip link set {device} netns {name}")
            _run(f"ip netns exec {name} ip addr add {network.address(rank)}/24 dev {device}")
            _run(f"ip netns exec {name} ip link set lo up")
            _run(f"ip netns exec {name} ip link set {device} up mtu {_LARGEST_PACKET}")
            _run(f"ip netns exec {name} tc qdisc add dev {device} {_shape(rate)}")
        thread.start()
        yield network
    finally:
        stopped.set()
        if thread.is_alive():
            thread.join()
        for file in files:
            os.close(file)
        for rank in range(world):
            subprocess.run(["ip", "netns", "del", f"{prefix}{rank}"], capture_output=True, check=False)


def change_rate(interface: str, rate: str) -> None:
    """Let an interface of this process's namespace send at another rate from now on."""
    _run(f"tc qdisc change dev {interface} {_shape(rate)}")


def _deliver(files: Sequence[int], delay_s: float, stopped: threading.Event) -> None:
    """Write each packet to its destination's tunnel when it is due."""
    due = collections.deque[tuple[float, int, bytes]]()
    while not stopped.is_set():
        ready, _, _ = select.select(files, [], [], max(0.0, due[0][0] - time.monotonic()) if due else 0.1)
        for file in ready:
            with contextlib.suppress(BlockingIOError):
                packet = os.read(file, 1 << 16)
                if packet[0] >> 4 == 4 and 0 < packet[19] <= len(files):  # IPv4; the address ends with the rank + 1
                    due.append((time.monotonic() + delay_s, files[packet[19] - 1], packet))
        while due and due[0][0] <= time.monotonic():
            _, file, packet = due.popleft()
            with contextlib.suppress(OSError):  # the namespace is gone
                os.write(file, packet)


def _shape(rate: str) -> str:
    return f"root tbf rate {rate} burst 256kb latency 50ms"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
