"""Gradient synchronisation: a strategy for each parameter, and the engines that execute it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ray.sync.builders import (
    SMA,
    AdaptiveSGD,
    AllReduce,
    Auto,
    DiLoCo,
    LocalSGD,
    PairAveraging,
    Parallax,
    PowerSGD,
    StrategyBuilder,
    ZeRO1,
    ZeRO2,
)
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.sharded.rules import RowAdagrad, RowAdam, RowSGD
from elastic_ray.sync.spec import Strategy
from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from elastic_ray.sync.row_changes import change_parameters
    from elastic_ray.sync.sharded.embedding import ShardedEmbedding

# Loaded on first use: builders and strategies load no torch.
_HOMES = {
    "elastic_ray.sync.row_changes": "change_parameters",
    "elastic_ray.sync.sharded.embedding": "ShardedEmbedding",
}

__all__ = [
    "SMA",
    "AdaptiveSGD",
    "AllReduce",
    "Auto",
    "DiLoCo",
    "LocalSGD",
    "PairAveraging",
    "Parallax",
    "PowerSGD",
    "RowAdagrad",
    "RowAdam",
    "RowSGD",
    "ShardedEmbedding",
    "Strategy",
    "StrategyBuilder",
    "StrategyError",
    "ZeRO1",
    "ZeRO2",
    "change_parameters",
]

__getattr__, _ = lazy_names(__name__, _HOMES)
