"""AutoDist's ``resource_spec.yml``, read as a hint: the ranks of a group and the speed of its links (pure).

For planning without a cluster. Where training runs, links are measured instead: formulas pick other strategies than
measurements do, gloo's broadcast being a tree and its reductions slower than a ring's.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.choosing import links
from elastic_ray.sync.choosing.links import LinkSample, LinkTable
from elastic_ray.sync.profile import Topology

_DEFAULT_GBIT_S = 1.0  # AutoDist's, where a node states none
_WITHIN_NODE_GBIT_S = 40.0  # through a machine's memory
_LATENCY_S = 1e-4  # of one message
_SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
_NODE_FIELDS = {"address", "gpus", "cpus", "chief", "network_bandwidth", "ssh_config"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSpec:
    """What a file says.

    Attributes:
        topology: one rank for each GPU, one for a node without.
        links: times by formulas: ring all-reduce and all-gather, tree broadcast.
        chief: address of the node that begins; the first where none is named.
    """

    topology: Topology
    links: LinkTable
    chief: str


def read_resource_spec(path: str | os.PathLike[str]) -> ResourceSpec:
    """Read a file.

    Args:
        path: of YAML with ``nodes``, each with ``address`` and, where it has them, ``gpus`` (numbers), ``chief``,
            ``network_bandwidth`` [Gbit/s, 1 where it is left out]; ``cpus``, ``ssh_config`` and ``ssh`` are not used.

    Raises:
        StrategyError: the file cannot be read, or a field is missing or out of range; the message names it.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StrategyError(f"resource spec {str(path)!r} cannot be read: {error}") from None
    try:
        return _parse(tree)
    except StrategyError as error:
        raise StrategyError(f"resource spec {str(path)!r}: {error}") from None


def _parse(tree: Any) -> ResourceSpec:
    """What the YAML says; errors name the field."""
    nodes = tree.get("nodes") if isinstance(tree, Mapping) else None
    if not isinstance(nodes, list) or not nodes:
        raise StrategyError(f"nodes must be a list of at least one node, but got {nodes!r}")
    ranks: list[str] = []
    chiefs: list[str] = []
    slowest = math.inf
    seen: set[str] = set()
    for index, node in enumerate(nodes):
        where = f"nodes[{index}]"
        if not isinstance(node, Mapping):
            raise StrategyError(f"{where} must be a mapping with an address, but got {node!r}")
        if strangers := sorted(map(str, set(node) - _NODE_FIELDS)):
            raise StrategyError(
                f"{where} has no field {', '.join(strangers)}; it has {', '.join(sorted(_NODE_FIELDS))}"
            )
        address = _address(node, where)
        if address in seen:
            raise StrategyError(f"{where}.address must be another than those before, but got {address!r} again")
        seen.add(address)
        ranks += [address] * max(1, _gpus(node, where))
        slowest = min(slowest, _bandwidth(node, where))
        if _chief(node, where):
            chiefs.append(address)
    if len(chiefs) > 1:
        raise StrategyError(f"chief must be true of one node, but it is of {', '.join(chiefs)}")
    topology = Topology(nodes=tuple(ranks))
    gbit_s = slowest if len(nodes) > 1 else _WITHIN_NODE_GBIT_S
    return ResourceSpec(
        topology=topology, links=links_by_formula(topology.world_size, gbit_s), chief=(chiefs or ranks)[0]
    )


def _address(node: Mapping[str, Any], where: str) -> str:
    address = node.get("address")
    if not isinstance(address, str) or not address:
        raise StrategyError(f"{where}.address must be a host name or an IP address, but got {address!r}")
    return address


def _gpus(node: Mapping[str, Any], where: str) -> int:
    """How many a node has."""
    gpus = node.get("gpus", [])
    if not isinstance(gpus, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in gpus):
        raise StrategyError(f"{where}.gpus must be a list of GPU numbers, as [0, 1], but got {gpus!r}")
    if len(set(gpus)) < len(gpus) or any(each < 0 for each in gpus):
        raise StrategyError(f"{where}.gpus must be different numbers from 0, but got {gpus!r}")
    return len(gpus)


def _bandwidth(node: Mapping[str, Any], where: str) -> float:
    given = node.get("network_bandwidth", _DEFAULT_GBIT_S)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not (0 < given < math.inf):
        raise StrategyError(f"{where}.network_bandwidth must be a number of Gbit/s above 0, but got {given!r}")
    return float(given)


def _chief(node: Mapping[str, Any], where: str) -> bool:
    chief = node.get("chief", False)
    if not isinstance(chief, bool):
        raise StrategyError(f"{where}.chief must be true or false, but got {chief!r}")
    return chief


def links_by_formula(world_size: int, gbit_s: float) -> LinkTable:
    """Times of collectives among ranks that a link of this speed connects, each with a link of its own.

    With W ranks, n bytes and bandwidth B: all-reduce 2 (W - 1) / W n / B, all-gather of n bytes in all and all-to-all
    (W - 1) / W n / B, broadcast ceil(log2 W) n / B, reduce as all-reduce; and latency for each message.

    Args:
        world_size: W.
        gbit_s: B [Gbit/s].
    """
    if world_size < 2:
        return LinkTable()
    ring, tree = world_size - 1, math.ceil(math.log2(world_size))
    volumes = {
        links.ALL_REDUCE: (2 * ring, 2 * ring / world_size),
        links.ALL_REDUCE_BF16: (2 * ring, 2 * ring / world_size),
        links.ALL_REDUCE_PARTS: (2 * ring * links.PARTS, 2 * ring / world_size),
        links.ALL_GATHER: (ring, ring / world_size),
        links.ALL_TO_ALL: (ring, ring / world_size),
        links.REDUCE: (2 * ring, 2 * ring / world_size),
        links.BROADCAST: (tree, float(tree)),
    }
    bytes_s = gbit_s * 1e9 / 8
    return LinkTable(
        samples=tuple(
            LinkSample(operation=operation, nbytes=size, seconds=messages * _LATENCY_S + volume * size / bytes_s)
            for operation, (messages, volume) in volumes.items()
            for size in _SIZES
        )
    )
