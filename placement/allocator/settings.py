"""Settings of the cluster's operator, from a ``cluster-policy.yaml`` file; they may change while jobs are running."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from placement.allocator.config import AllocatorConfig
from placement.arguments import meant
from placement.autoscaling.autoscaler import AutoscalerConfig, Autoscaling
from placement.autoscaling.cluster_file import read_cluster_file
from placement.checks import check_whole
from placement.cluster.node_types import NodeType
from placement.errors import InputError, reading
from placement.planning.tenants import Tenant
from placement.unique_keys import load_yaml

_Made = TypeVar("_Made")
_SECTIONS = ("tenants", "priorities", "autoscaling", "page")
_TENANT = ("weight", "quota")
_AUTOSCALING = ("cluster_file", *(field.name for field in dataclasses.fields(Autoscaling)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Settings that override ``AllocatorConfig``; None keeps the configured value."""

    tenants: tuple[Tenant, ...] | None = None  # weights and quotas
    # priority by name of a job, or by pattern (``prod-*``); ``AllocatorConfig.priorities``
    priorities: Mapping[str, int] | None = None
    autoscaling: Autoscaling | Literal["auto", "off"] | None = None  # node types on offer, or ``"auto"``, or ``"off"``
    page: bool | None = None  # serve the page from the head node

    @classmethod
    def from_file(cls, path: str | Path) -> OperatorSettings:
        """Read an operator's settings from a file."""
        with reading(str(path), yaml.YAMLError):
            plain = load_yaml(Path(path).read_text(encoding="utf-8"))
        return cls.from_plain({} if plain is None else plain, where=str(path), folder=Path(path).parent)

    @classmethod
    def from_plain(cls, plain: object, *, where: str, folder: Path | None = None) -> OperatorSettings:
        """Build settings from mappings, lists, numbers and text, as parsed from a file or a stored note.

        Args:
            where: Name of the source in error messages.
            folder: Folder that ``cluster_file`` is relative to; None if no file may be read.
        """
        said = _mapping(plain, where, _SECTIONS)
        page, tenants, priorities = said.get("page"), said.get("tenants"), said.get("priorities")
        if page is not None and not isinstance(page, bool):
            raise InputError(f"{where}: page must be true or false, but got {page!r}")
        scaling = said.get("autoscaling")
        if isinstance(scaling, bool):  # YAML reads a bare off as false
            scaling = "auto" if scaling else "off"
        return cls(
            tenants=None if tenants is None else _tenants(tenants, f"{where}: tenants"),
            priorities=None if priorities is None else _priorities(priorities, f"{where}: priorities"),
            autoscaling=None if scaling is None else _autoscaling(scaling, f"{where}: autoscaling", folder),
            page=page,
        )

    def over(self, config: AllocatorConfig) -> AllocatorConfig:
        """Return the configuration with these settings applied; a setting of None changes nothing."""
        names = {"tenants": "tenants", "priorities": "priorities", "autoscaling": "autoscaling", "page": "dashboard"}
        said = {ours: getattr(self, name) for name, ours in names.items() if getattr(self, name) is not None}
        if said.get("autoscaling") == "off":
            said["autoscaling"] = None
        return dataclasses.replace(config, **said)

    def to_plain(self) -> dict[str, Any]:
        """Return the settings in the form that :meth:`from_plain` accepts."""
        plain: dict[str, Any] = {}
        if self.tenants is not None:
            plain["tenants"] = {each.name: {"weight": each.weight, "quota": dict(each.quota)} for each in self.tenants}
        if self.priorities is not None:
            plain["priorities"] = dict(self.priorities)
        if self.autoscaling is not None:
            scaling = self.autoscaling
            plain["autoscaling"] = scaling if isinstance(scaling, str) else _scaling_as_plain(scaling)
        if self.page is not None:
            plain["page"] = self.page
        return plain


def in_force(config: AllocatorConfig) -> OperatorSettings:
    """Return the operator settings that are equivalent to a configuration, with every value set."""
    return OperatorSettings(
        tenants=config.tenants,
        priorities=config.priorities,
        autoscaling="off" if config.autoscaling is None else config.autoscaling,
        page=config.dashboard,
    )


def check_quotas(tenants: Collection[Tenant], known: Collection[str]) -> None:
    """Raise InputError if a quota names a resource that no node has.

    Args:
        known: Resource names from all nodes, including nodes that could be requested.
    """
    for tenant in tenants:
        for resource in tenant.quota:
            if resource not in known:
                raise InputError(
                    f"quota of tenant {tenant.name!r}: no node has the resource {resource!r}{meant(resource, known)}"
                )


def _mapping(value: object, where: str, known: Collection[str] | None = None) -> Mapping[str, Any]:
    """Return a mapping with string keys; if ``known`` is given, each key must be in it."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a mapping, but got {value!r:.80}")
    for key in value:
        if not isinstance(key, str):
            raise InputError(f"{where}: {key!r} must be text: put it between quotation marks")
        if known is not None and key not in known:
            raise InputError(f"{where}: there is no setting {key!r}{meant(key, known)}")
    return value


def _made(where: str, make: Callable[..., _Made], *arguments: Any, **fields: Any) -> _Made:
    """Return the result of ``make``; its TypeError or ValueError becomes an InputError that names the location."""
    try:
        return make(*arguments, **fields)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from error


def _tenants(plain: object, where: str) -> tuple[Tenant, ...]:
    """Return tenants with weights and quotas from a mapping by name; an empty entry means the defaults."""
    found = []
    for name, said in _mapping(plain, where).items():
        body = _mapping({} if said is None else said, f"{where}: {name}", _TENANT)
        quota = _mapping(body.get("quota") or {}, f"{where}: {name}: quota")
        found.append(_made(where, Tenant, name=name, weight=body.get("weight", 1.0), quota=dict(quota)))
    return tuple(found)


def _priorities(plain: object, where: str) -> Mapping[str, int]:
    for pattern, value in _mapping(plain, where).items():
        check_whole(f"{where}: {pattern}", value, least=None, error=InputError)
    return dict(_mapping(plain, where))


def _autoscaling(plain: object, where: str, folder: Path | None) -> Autoscaling | Literal["auto", "off"]:
    """Return "auto", "off", or ``Autoscaling`` with node types from a cluster file or a list."""
    if plain in ("auto", "off"):
        return "auto" if plain == "auto" else "off"
    if isinstance(plain, str):
        raise InputError(f"{where} must be auto, off, or a mapping with cluster_file, but got {plain!r}")
    body = dict(_mapping(plain, where, _AUTOSCALING))
    cluster_file, listed = body.pop("cluster_file", None), body.pop("node_types", None)
    if (cluster_file is None) == (listed is None):
        raise InputError(f"{where} must have either cluster_file or node_types")
    if cluster_file is not None:
        if folder is None:
            raise InputError(f"{where}: cluster_file cannot be read from here")
        file = _made(where, read_cluster_file, folder / str(cluster_file))
        body = {"max_nodes": file.max_nodes, **body}
        types = file.types
    else:
        known = [field.name for field in dataclasses.fields(NodeType)]
        if not isinstance(listed, list):
            raise InputError(f"{where}: node_types must be a list, but got {listed!r:.80}")
        bodies = [_mapping(each, f"{where}: node_types", known) for each in listed]
        types = tuple(_made(where, NodeType, **each) for each in bodies)
    if "times" in body:
        known = [field.name for field in dataclasses.fields(AutoscalerConfig)]
        times = _mapping(body["times"], f"{where}: times", known)
        body["times"] = _made(where, AutoscalerConfig, **times)
    return _made(where, Autoscaling, node_types=types, **body)


def _scaling_as_plain(scaling: Autoscaling) -> dict[str, Any]:
    """Return the mapping that ``_autoscaling`` accepts; an objective object is reduced to its class name."""
    objective = scaling.objective
    said = {field.name: getattr(scaling, field.name) for field in dataclasses.fields(Autoscaling)}
    return {
        **{name: value for name, value in said.items() if value is not None},
        "node_types": [dataclasses.asdict(each) for each in scaling.node_types],
        "objective": objective if isinstance(objective, str) else type(objective).__name__,
        "times": dataclasses.asdict(scaling.times),
    }
