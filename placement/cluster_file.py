"""Node types out of a cluster file: Ray's ``cluster.yaml`` or a KubeRay ``RayCluster``; what is wrong is said at once.

``python -m placement.cluster_file cluster.yaml`` checks a file and prints what it offers. ``ray up`` checks Ray's own
schema; here is what that does not look at: a worker type, its price, and the labels that jobs and allocator choose by.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from placement.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT
from placement.errors import InputError
from placement.node_types import NodeType, check_types
from placement.price_table import PriceTable, read_prices

MARKETS = (SPOT, "on-demand")
SPOT_LASTS_H = 12.0
"""How long a spot node is expected to last before any was seen [h]."""
STARTUP_S = 240.0
"""How long a cloud's machine takes from being asked for to being part of Ray's cluster [s]."""

_INSTANCE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_SPOT_SELECTORS = {
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """What a cluster file offers.

    Attributes:
        path: the file.
        types: worker types.
        max_nodes: workers of all types together; None for no such limit.
        idle_s: time without work after which Ray's autoscaler lets a node go [s].
    """

    path: str
    types: tuple[NodeType, ...]
    max_nodes: int | None
    idle_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Raw:
    """A worker type as the file has it, whichever kind of file it is."""

    name: str
    instance: str
    spot: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    least: int
    most: int


def read_cluster_file(path: str | Path, prices: PriceTable | None = None) -> ClusterFile:
    """Read the worker types, with their prices.

    Args:
        path: YAML of ``ray up``, or of a RayCluster.
        prices: by instance type; rounded defaults if None.

    Raises:
        InputError: the file cannot be read, has no worker type, an instance type without a price, a label that says
            otherwise than its market, or a head that takes work; names the file, the type, and what is right.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cluster file {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"cluster file {path} must hold a mapping, but holds {type(found).__name__}")
    kuberay = found.get("kind") == "RayCluster"
    raw = _of_ray_cluster(found, str(path)) if kuberay else _of_ray_up(found, str(path))
    if not any(each.most for each in raw):
        where = "spec.workerGroupSpecs" if kuberay else "available_node_types"
        raise InputError(
            f"cluster file {path} must have a worker type with a maximum of 1 or more under {where}, "
            "but has none: no job could ever get a node"
        )
    types = tuple(_node_type(each, prices or PriceTable(), str(path)) for each in raw if each.most)
    check_types(types)
    if kuberay:
        options = found["spec"].get("autoscalerOptions") or {}
        return ClusterFile(
            path=str(path), types=types, max_nodes=None, idle_s=float(options.get("idleTimeoutSeconds", 60))
        )
    most = found.get("max_workers")
    return ClusterFile(
        path=str(path),
        types=types,
        max_nodes=None if most is None else int(most),
        idle_s=60.0 * float(found.get("idle_timeout_minutes", 5)),
    )


def _node_type(raw: _Raw, prices: PriceTable, path: str) -> NodeType:
    where = f"cluster file {path}, node type {raw.name!r}"
    try:
        price = prices.instance(raw.instance)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    market = SPOT if raw.spot else "on-demand"
    said = raw.labels.get(MARKET_LABEL)
    if said != market:
        raise InputError(
            f"{where}: labels must say {MARKET_LABEL}: {market}, for that is what it is, but got {said!r}; "
            "jobs that avoid spot nodes choose by it"
        )
    gpus = float(raw.resources.get("GPU", 0.0))
    if gpus and GPU_TYPE_LABEL not in raw.labels:
        raise InputError(f"{where}: labels must name the type of its GPUs, {GPU_TYPE_LABEL}: {price.gpu or 'T4'}")
    if gpus != price.gpus:
        raise InputError(f"{where}: resources must have GPU: {price.gpus}, as {raw.instance} has, but got {gpus:g}")
    return NodeType(
        name=raw.name,
        resources=raw.resources,
        labels=raw.labels,
        usd_per_h=price.usd_per_h(spot=raw.spot),
        min_nodes=raw.least,
        max_nodes=raw.most,
        startup_s=STARTUP_S,
        lasts_h=SPOT_LASTS_H if raw.spot else math.inf,
    )


def _of_ray_up(found: Mapping[str, Any], path: str) -> list[_Raw]:
    types = found.get("available_node_types")
    if not isinstance(types, dict) or not types:
        raise InputError(f"cluster file {path} must have node types under available_node_types, but has none")
    head = found.get("head_node_type")
    if head not in types:
        raise InputError(f"head_node_type of cluster file {path} must be one of {', '.join(types)}, but got {head!r}")
    if float((types[head].get("resources") or {}).get("CPU", 1)) > 0:
        raise InputError(
            f"cluster file {path}, head node type {head!r}: resources must have CPU: 0, or jobs train on the head"
        )
    limit = found.get("max_workers", 2)  # Ray's own default
    raw = []
    for name, each in types.items():
        if name == head and not each.get("max_workers"):
            continue
        config = each.get("node_config") or {}
        raw.append(
            _Raw(
                name=name,
                instance=str(config.get("InstanceType") or config.get("machineType") or ""),
                spot=_is_spot(config),
                resources=_amounts(each.get("resources"), f"cluster file {path}, node type {name!r}"),
                labels={str(k): str(v) for k, v in (each.get("labels") or {}).items()},
                least=int(each.get("min_workers", 0)),
                most=int(min(each.get("max_workers", limit), limit)),
            )
        )
    return raw


def _is_spot(config: Mapping[str, Any]) -> bool:
    """Whether AWS's or Google's node configuration asks for a machine that may be taken away."""
    options = config.get("InstanceMarketOptions") or {}
    if options.get("MarketType") == "spot":
        return True
    scheduling = config.get("scheduling") or []
    settings = scheduling if isinstance(scheduling, list) else [scheduling]
    return any(each.get("preemptible") or each.get("provisioningModel") == "SPOT" for each in settings)


def _of_ray_cluster(found: Mapping[str, Any], path: str) -> list[_Raw]:
    spec = found.get("spec") or {}
    head = (spec.get("headGroupSpec") or {}).get("rayStartParams") or {}
    if float(head.get("num-cpus", 1)) > 0:
        raise InputError(
            f'cluster file {path}, headGroupSpec: rayStartParams must have num-cpus: "0", or jobs train on the head'
        )
    raw = []
    for group in spec.get("workerGroupSpecs") or []:
        name = str(group.get("groupName") or "")
        where = f"cluster file {path}, worker group {name!r}"
        pod = (group.get("template") or {}).get("spec") or {}
        selector = pod.get("nodeSelector") or {}
        containers = pod.get("containers") or [{}]
        limits = (containers[0].get("resources") or {}).get("limits") or {}
        amounts = {"CPU": limits.get("cpu"), "GPU": limits.get("nvidia.com/gpu")}
        raw.append(
            _Raw(
                name=name,
                instance=str(next((selector[label] for label in _INSTANCE_LABELS if label in selector), "")),
                spot=any(str(selector.get(label)) == value for label, value in _SPOT_SELECTORS.items()),
                resources=_amounts({k: v for k, v in amounts.items() if v is not None}, where),
                labels={str(k): str(v) for k, v in (group.get("labels") or {}).items()},
                least=int(group.get("minReplicas", 0)),
                most=int(group.get("maxReplicas", 0)),
            )
        )
    return raw


def _amounts(resources: object, where: str) -> dict[str, float]:
    if not isinstance(resources, Mapping) or not resources:
        raise InputError(
            f"{where}: resources must say what a node has, such as {{CPU: 48, GPU: 4}}, but got {resources}"
        )
    try:
        return {str(name): float(amount) for name, amount in resources.items()}
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: resources must be numbers, but got {dict(resources)}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a file; 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m placement.cluster_file", description=__doc__)
    parser.add_argument("file", help="cluster.yaml of ray up, or a RayCluster")
    parser.add_argument("--prices", metavar="FILE", help="CSV or JSON: type, on_demand, spot, gpu, gpus [USD/h]")
    options = parser.parse_args(arguments)
    try:
        found = read_cluster_file(options.file, read_prices(options.prices) if options.prices else None)
    except InputError as error:
        print(f"placement.cluster_file: {error}", file=sys.stderr)
        return 2
    for each in found.types:
        gpus = f"{each.resources.get('GPU', 0.0):g} x {each.gpu_type}"
        market = SPOT if each.spot else "on demand"
        print(f"{each.name}: {gpus}, {market}, {each.usd_per_h:.2f} USD/h, {each.min_nodes} to {each.max_nodes} nodes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
