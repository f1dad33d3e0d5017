"""Where the ranks of a benchmark run: on loopback, or each in a network namespace behind a link of 1 Gbit/s."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Protocol

_BRIDGE_ADDRESS = "10.231.7.254"


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
            shape = f"root tbf rate {rate} burst 256kb latency 50ms"
            _run(f"ip netns exec {name} tc qdisc add dev {inside} {shape}")
            _run(f"tc qdisc add dev {outside} {shape}")
        yield network
    finally:
        for rank in range(world):
            subprocess.run(["ip", "netns", "del", f"{prefix}{rank}"], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"{prefix}o{rank}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
