"""Settings of an operator in a file, ``cluster-policy.yaml``, which may change while jobs run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from placement.allocator.config import AllocatorConfig
from placement.autoscaling.autoscaler import AutoscalerConfig
from placement.autoscaling.cluster_file import read_cluster_file
from placement.autoscaling.config import Autoscaling
from placement.cluster.node_types import NodeType
from placement.errors import InputError
from placement.planning.tenants import Tenant
from placement.text import meant

_Made = TypeVar("_Made")
_SECTIONS = ("tenants", "priorities", "autoscaling", "page")
_TENANT = ("weight", "quota")
_AUTOSCALING = ("cluster_file", *(field.name for field in dataclasses.fields(Autoscaling)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Settings that outrank those of ``AllocatorConfig``; None leaves one as that has it.

    Attributes:
        tenants: weights and quotas.
        priorities: priority by name of a job, or by pattern (``prod-*``); ``AllocatorConfig.priorities``.
        autoscaling: node types on offer, or ``"auto"``, or ``"off"``.
        page: serve the page from the head node.
    """

    tenants: tuple[Tenant, ...] | None = None
    priorities: Mapping[str, int] | None = None
    autoscaling: Autoscaling | Literal["auto", "off"] | None = None
    page: bool | None = None

    @classmethod
    def from_file(cls, path: str | Path) -> OperatorSettings:
        """Read a file of settings.

        Raises InputError: it cannot be read, or says something that is not understood; names the place and what is
        right.
        """
        try:
            plain = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        return cls.from_plain({} if plain is None else plain, where=str(path), folder=Path(path).parent)

    @classmethod
    def from_plain(cls, plain: object, *, where: str, folder: Path | None = None) -> OperatorSettings:
        """Build settings from mappings, lists, numbers and text, as a file or a note has them.

        Args:
            where: what errors call its source.
            folder: what ``cluster_file`` is relative to; None where no file may be read.

        Raises InputError: it says something that is not understood.
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
        """Return the configuration with these settings in place of its own."""
        names = {"tenants": "tenants", "priorities": "priorities", "autoscaling": "autoscaling", "page": "dashboard"}
        said = {ours: getattr(self, name) for name, ours in names.items() if getattr(self, name) is not None}
        if said.get("autoscaling") == "off":
            said["autoscaling"] = None
        return dataclasses.replace(config, **said)

    def to_plain(self) -> dict[str, Any]:
        """Return what :meth:`from_plain` takes."""
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
    """Return the settings that a configuration comes to, all of them said."""
    return OperatorSettings(
        tenants=config.tenants,
        priorities=config.priorities,
        autoscaling="off" if config.autoscaling is None else config.autoscaling,
        page=config.dashboard,
    )


def check_quotas(tenants: Collection[Tenant], known: Collection[str]) -> None:
    """Refuse a quota of a resource that no node has.

    Args:
        known: names of resources of all nodes, those on offer included.

    Raises InputError: there is one.
    """
    for tenant in tenants:
        for resource in tenant.quota:
            if resource not in known:
                raise InputError(
                    f"quota of tenant {tenant.name!r}: no node has the resource {resource!r}{meant(resource, known)}"
                )


def _mapping(value: object, where: str, known: Collection[str] | None = None) -> Mapping[str, Any]:
    """A mapping with keys of text, out of the known ones if there are any."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a mapping, but got {value!r:.80}")
    for key in value:
        if not isinstance(key, str):
            raise InputError(f"{where}: {key!r} must be text: put it between quotation marks")
        if known is not None and key not in known:
            raise InputError(f"{where}: there is no setting {key!r}{meant(key, known)}")
    return value


def _made(where: str, make: Callable[..., _Made], *arguments: Any, **fields: Any) -> _Made:
    """Return the result of ``make``; its TypeError or ValueError becomes an InputError that names the place."""
    try:
        return make(*arguments, **fields)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from error


def _tenants(plain: object, where: str) -> tuple[Tenant, ...]:
    """Tenants by name, each with weight and quota; nothing stands for the defaults."""
    found = []
    for name, said in _mapping(plain, where).items():
        body = _mapping({} if said is None else said, f"{where}: {name}", _TENANT)
        quota = _mapping(body.get("quota") or {}, f"{where}: {name}: quota")
        weight = body.get("weight", 1.0)
        for what, value in (("weight", weight), *((f"quota: {key}", value) for key, value in quota.items())):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{where}: {name}: {what} must be a number, but got {value!r}")
        found.append(_made(where, Tenant, name=name, weight=weight, quota=dict(quota)))
    return tuple(found)


def _priorities(plain: object, where: str) -> Mapping[str, int]:
    for pattern, value in _mapping(plain, where).items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{where}: {pattern} must be a whole number, but got {value!r}")
    return dict(_mapping(plain, where))


def _autoscaling(plain: object, where: str, folder: Path | None) -> Autoscaling | Literal["auto", "off"]:
    """Node types of a cluster file or of a list, with the other fields of ``Autoscaling``; or a word."""
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
        bodies = [_mapping(each, f"{where}: node_types", known) for each in _list(listed, f"{where}: node_types")]
        types = tuple(_made(where, NodeType, **each) for each in bodies)
    if "times" in body:
        known = [field.name for field in dataclasses.fields(AutoscalerConfig)]
        times = _mapping(body["times"], f"{where}: times", known)
        body["times"] = _made(where, AutoscalerConfig, **times)
    return _made(where, Autoscaling, node_types=types, **body)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where} must be a list, but got {value!r:.80}")
    return value


def _scaling_as_plain(scaling: Autoscaling) -> dict[str, Any]:
    """The mapping that ``_autoscaling`` takes; of an objective that is an object, the name of its class."""
    objective = scaling.objective
    said = {field.name: getattr(scaling, field.name) for field in dataclasses.fields(Autoscaling)}
    return {
        **{name: value for name, value in said.items() if value is not None},
        "node_types": [dataclasses.asdict(each) for each in scaling.node_types],
        "objective": objective if isinstance(objective, str) else type(objective).__name__,
        "times": dataclasses.asdict(scaling.times),
    }
