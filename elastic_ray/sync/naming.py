"""Resolution of a strategy that users give as a name, a builder, a ``Strategy``, or a path to JSON (pure)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic_ray.sync import builders
from elastic_ray.sync.builders import StrategyBuilder
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.plan import ModelProfile, Topology
from elastic_ray.sync.spec import Owner, Reduce, Strategy, Wire

NAMED: Mapping[str, Callable[[], StrategyBuilder]] = {
    "all_reduce": builders.AllReduce,
    "two_level": lambda: builders.AllReduce(topology="two_level"),
    "ring": lambda: builders.AllReduce(topology="ring"),
    "tree": lambda: builders.AllReduce(topology="tree"),
    "star": lambda: builders.AllReduce(topology="star"),
    "ps": builders.PS,
    "ps_balanced": builders.PSLoadBalancing,
    "zero1": builders.ZeRO1,
    "zero2": builders.ZeRO2,
    "partitioned_ps": builders.PartitionedPS,
    "uneven_partitioned_ps": builders.UnevenPartitionedPS,
    "partitioned_ar": builders.PartitionedAR,
    "random_axis_partition_ar": builders.RandomAxisPartitionAR,
    "parallax": builders.Parallax,
    "bf16": lambda: builders.AllReduce(wire=Wire(dtype="bf16")),
    "fp16": lambda: builders.AllReduce(wire=Wire(dtype="fp16")),
    "int8": lambda: builders.AllReduce(wire=Wire(dtype="int8")),
    "powersgd": builders.PowerSGD,
    "local_sgd": builders.LocalSGD,
    "diloco": builders.DiLoCo,
    "sma": builders.SMA,
    "pair": builders.PairAveraging,
    "auto": builders.Auto,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Ready:
    """Builder that returns a given strategy."""

    strategy: Strategy

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Return the given strategy unchanged."""
        return self.strategy


@dataclasses.dataclass(frozen=True, slots=True)
class _Everywhere:
    """Builder that applies one `sync` to all dense parameters."""

    sync: Reduce | Owner

    def build(self, profile: ModelProfile, topology: Topology) -> Strategy:
        """Return the strategy; parameters with sparse gradients are excluded."""
        return builders.dense(self.sync, profile, "")


def resolve_strategy(given: object) -> StrategyBuilder:
    """Return the strategy builder for a user's ``strategy=`` argument.

    Args:
        given: A name in :data:`NAMED`, a builder, a ``Strategy``, a ``Reduce`` or ``Owner`` for all parameters,
            or the path of a strategy's JSON file.

    Raises:
        StrategyError: the name or file does not exist, or the file does not contain a valid strategy.
        TypeError: `given` has none of these types.
    """
    if isinstance(given, Strategy):
        return _Ready(given)
    if isinstance(given, (Reduce, Owner)):
        return _Everywhere(given)
    if isinstance(given, os.PathLike) or (isinstance(given, str) and (given.endswith(".json") or os.sep in given)):
        return _Ready(_read(Path(given)))
    if isinstance(given, str):
        if given not in NAMED:
            raise StrategyError(
                f"strategy must be one of {', '.join(NAMED)}, a builder of elastic_ray.sync, a Strategy, or the path "
                f"of its JSON, but got {given!r}"
            )
        return NAMED[given]()
    if isinstance(given, type) or not callable(getattr(given, "build", None)):
        hint = "; make one of it: call it" if isinstance(given, type) else ""
        hint = hint or ("; Strategy.from_json(json.dumps(...)) reads one" if isinstance(given, dict) else "")
        raise TypeError(f"strategy must be a name, a builder, a Strategy or a path, but got {given!r}{hint}")
    return given  # type: ignore[return-value]


def _read(path: Path) -> Strategy:
    """Return the strategy in a file; errors name the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise StrategyError(f"strategy {str(path)!r} cannot be read: {error}") from None
    try:
        return Strategy.from_json(text)
    except StrategyError as error:
        raise StrategyError(f"strategy {str(path)!r}: {error}") from None
