"""Node types from a cluster file (Ray's ``cluster.yaml`` or a KubeRay ``RayCluster``), validated when it is read.

``python -m placement.autoscaling.cluster_file cluster.yaml`` checks a file and prints its node types. Unlike
``ray up``, which validates only Ray's own schema, it checks that the file has a worker type, a price for it, and the
labels that jobs and the allocator use to choose nodes.
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

from placement.checks import is_whole
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT
from placement.cluster.node_types import NodeType, check_types
from placement.cluster.price_table import PriceTable, read_prices
from placement.errors import InputError, reading
from placement.unique_keys import load_yaml

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
    """Node types and limits of a cluster file."""

    path: str
    types: tuple[NodeType, ...]  # worker types
    max_nodes: int | None  # workers of all types together; None for no such limit
    idle_s: float  # time without work after which Ray's autoscaler lets a node go [s]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Raw:
    """A worker type, read from either kind of file."""

    name: str
    instance: str
    spot: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    least: int
    most: int


def read_cluster_file(path: str | Path, prices: PriceTable | None = None) -> ClusterFile:
    """Read the worker types from a cluster file, with their prices.

    Raises InputError: the file cannot be read, has no worker type, an instance type without a price, a label that
    contradicts its market, a head that accepts work, or a field that is empty or of the wrong type. The message names
    the file, the type, and a correct value.
    """
    with reading(f"cluster file {path}", yaml.YAMLError):
        found = load_yaml(Path(path).read_text(encoding="utf-8"))
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
    where = f"cluster file {path}"
    if kuberay:
        options = _mapping(found["spec"].get("autoscalerOptions") or {}, f"{where}: autoscalerOptions", "{version: v2}")
        idle_s = _number(options, "idleTimeoutSeconds", where, 60.0)
        return ClusterFile(path=str(path), types=types, max_nodes=None, idle_s=idle_s)
    return ClusterFile(
        path=str(path),
        types=types,
        max_nodes=_whole(found, "max_workers", where, 0) if "max_workers" in found else None,
        idle_s=60.0 * _number(found, "idle_timeout_minutes", where, 5.0),
    )


def _node_type(raw: _Raw, prices: PriceTable, path: str) -> NodeType:
    """Return the node type with the price for its market."""
    where = f"cluster file {path}, node type {raw.name!r}"
    try:
        price = prices.instance(raw.instance)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    market = SPOT if raw.spot else "on-demand"
    said = raw.labels.get(MARKET_LABEL)
    if said != market:
        raise InputError(
            f"{where}: labels must say {MARKET_LABEL}: {market}, to match its node type, but got {said!r}; "
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
    """Return the worker types of a ``ray up`` file, including the head's type if its ``max_workers`` is above 0."""
    types = found.get("available_node_types")
    if not isinstance(types, dict) or not types:
        raise InputError(f"cluster file {path} must have node types under available_node_types, but has none")
    head = found.get("head_node_type")
    if not isinstance(head, str) or head not in types:
        names = ", ".join(map(str, types))
        raise InputError(f"head_node_type of cluster file {path} must be one of {names}, but got {head!r}")
    bodies = {
        str(name): _mapping(each, f"cluster file {path}: node type {name!r}", "{resources: {CPU: 48, GPU: 4}}")
        for name, each in types.items()
    }
    where = f"cluster file {path}, head node type {head!r}"
    resources = _mapping(bodies[head].get("resources") or {}, f"{where}: resources", "{CPU: 0}")
    if _number(resources, "CPU", f"{where}: resources", 1.0) > 0:
        raise InputError(f"{where}: resources must have CPU: 0, or jobs train on the head")
    limit = _whole(found, "max_workers", f"cluster file {path}", 2)  # Ray's own default
    return [
        _of_type(name, each, limit, f"cluster file {path}, node type {name!r}")
        for name, each in bodies.items()
        if name != head or each.get("max_workers")
    ]


def _of_type(name: str, body: Mapping[str, Any], limit: int, where: str) -> _Raw:
    """Return one of ``available_node_types``, with at most ``limit`` nodes; ``instance`` is empty if not named."""
    config = _mapping(body.get("node_config") or {}, f"{where}: node_config", "{InstanceType: g4dn.12xlarge}")
    return _Raw(
        name=name,
        instance=str(config.get("InstanceType") or config.get("machineType") or ""),
        spot=_is_spot(config, where),
        resources=_amounts(body.get("resources"), where),
        labels=_labels(body, where),
        least=_whole(body, "min_workers", where, 0),
        most=min(_whole(body, "max_workers", where, limit), limit),
    )


def _is_spot(config: Mapping[str, Any], where: str) -> bool:
    """True if an AWS or Google node configuration requests a machine that may be reclaimed."""
    what = f"{where}: InstanceMarketOptions"
    options = _mapping(config.get("InstanceMarketOptions") or {}, what, "{MarketType: spot}")
    if options.get("MarketType") == "spot":
        return True
    scheduling = config.get("scheduling") or []
    settings = [
        _mapping(each, f"{where}: scheduling", "{provisioningModel: SPOT}")
        for each in (scheduling if isinstance(scheduling, list) else [scheduling])
    ]
    return any(each.get("preemptible") or each.get("provisioningModel") == "SPOT" for each in settings)


def _of_ray_cluster(found: Mapping[str, Any], path: str) -> list[_Raw]:
    """Return the worker groups of a RayCluster, possibly none. Raise InputError if its head accepts work."""
    spec = _mapping(found.get("spec"), f"cluster file {path}: spec", "{headGroupSpec: ..., workerGroupSpecs: ...}")
    where = f"cluster file {path}, headGroupSpec"
    head = _within(spec, ("headGroupSpec", "rayStartParams"), f"cluster file {path}")
    if _number(head, "num-cpus", f"{where}: rayStartParams", 1.0) > 0:
        raise InputError(f'{where}: rayStartParams must have num-cpus: "0", or jobs train on the head')
    groups = spec.get("workerGroupSpecs") or []
    if not isinstance(groups, list):
        raise InputError(f"cluster file {path}: workerGroupSpecs must be a list of worker groups, but got {groups!r}")
    return [_of_group(group, path) for group in groups]


def _of_group(found: object, path: str) -> _Raw:
    """Return one worker group: its first container's limits, with type and market from its node selector."""
    group = _mapping(found, f"cluster file {path}: each worker group", "{groupName: t4-spot, maxReplicas: 8}")
    name = str(group.get("groupName") or "")
    where = f"cluster file {path}, worker group {name!r}"
    pod = _within(group, ("template", "spec"), where)
    selector = _within(pod, ("nodeSelector",), where)
    containers = pod.get("containers") or [{}]
    if not isinstance(containers, list):
        raise InputError(f"{where}: containers must be a list, but got {containers!r}")
    container = _mapping(containers[0], f"{where}: each container", "{name: ray-worker, image: ...}")
    limits = _within(container, ("resources", "limits"), where)
    amounts = {"CPU": limits.get("cpu"), "GPU": limits.get("nvidia.com/gpu")}
    return _Raw(
        name=name,
        instance=str(next((selector[label] for label in _INSTANCE_LABELS if label in selector), "")),
        spot=any(str(selector.get(label)) == value for label, value in _SPOT_SELECTORS.items()),
        resources=_amounts({k: v for k, v in amounts.items() if v is not None}, where),
        labels=_labels(group, where),
        least=_whole(group, "minReplicas", where, 0),
        most=_whole(group, "maxReplicas", where, 0),
    )


def _mapping(value: object, what: str, like: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise InputError(f"{what} must be a mapping, such as {like}, but {_got(value)}")


def _within(value: Mapping[str, Any], path: Sequence[str], where: str) -> Mapping[str, Any]:
    """Return the mapping at the end of a path; empty if it is missing or empty."""
    for name in path:
        value = _mapping(value.get(name) or {}, f"{where}: {name}", "{name: value}")
    return value


def _labels(body: Mapping[str, Any], where: str) -> dict[str, str]:
    labels = _mapping(body.get("labels") or {}, f"{where}: labels", "{ray.io/market-type: spot}")
    return {str(name): str(value) for name, value in labels.items()}


def _whole(body: Mapping[str, Any], field: str, where: str, default: int) -> int:
    value = body.get(field, default)
    if is_whole(value):
        return int(value)
    raise InputError(f"{where}: {field} must be a whole number, 0 or more, but {_got(value)}")


def _number(body: Mapping[str, Any], field: str, where: str, default: float) -> float:
    """Return the field, or else the default, as a finite number of at least 0; text is converted."""
    value = body.get(field, default)
    try:
        number = float(value)  # "0" too: Kubernetes has some numbers as strings
    except (TypeError, ValueError):
        number = math.nan
    if number >= 0 and math.isfinite(number):
        return number
    raise InputError(f"{where}: {field} must be a number, 0 or more, but {_got(value)}")


def _got(value: object) -> str:
    return "it is left empty" if value is None else f"got {value!r}"


def _amounts(resources: object, where: str) -> dict[str, float]:
    """Return the resources of one node by name. Raise InputError if they are missing, empty or not numbers."""
    if not isinstance(resources, Mapping) or not resources:
        raise InputError(
            f"{where}: resources must say what a node has, such as {{CPU: 48, GPU: 4}}, but got {resources}"
        )
    try:
        return {str(name): float(amount) for name, amount in resources.items()}
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: resources must be numbers, but got {dict(resources)}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a file and print its node types; return 0, or 2 after printing a one-line error."""
    parser = argparse.ArgumentParser(prog="python -m placement.autoscaling.cluster_file", description=__doc__)
    parser.add_argument("file", help="cluster.yaml of ray up, or a RayCluster")
    parser.add_argument("--prices", metavar="FILE", help="CSV or JSON: type, on_demand, spot, gpu, gpus [USD/h]")
    options = parser.parse_args(arguments)
    try:
        found = read_cluster_file(options.file, read_prices(options.prices) if options.prices else None)
    except InputError as error:
        print(f"placement.autoscaling.cluster_file: {error}", file=sys.stderr)
        return 2
    for each in found.types:
        gpus = f"{each.resources.get('GPU', 0.0):g} x {each.gpu_type}"
        market = SPOT if each.spot else "on demand"
        print(f"{each.name}: {gpus}, {market}, {each.usd_per_h:.2f} USD/h, {each.min_nodes} to {each.max_nodes} nodes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
