"""Gradient synchronisation: a strategy for each parameter, and the engines that carry it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ray.sync.builders import (
    PS,
    SMA,
    AdaptiveSGD,
    AllReduce,
    Auto,
    DiLoCo,
    LocalSGD,
    PairAveraging,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PowerSGD,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    StrategyBuilder,
    UnevenPartitionedPS,
    ZeRO1,
    ZeRO2,
)
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.choosing.explanation import StrategyTable
from elastic_ray.sync.profile import ModelProfile, OptimizerInfo, ParamInfo, Topology
from elastic_ray.sync.sharded.rules import RowAdagrad, RowAdam, RowSGD
from elastic_ray.sync.spec import Average, Owner, Reduce, Rows, Rule, Strategy, Wire
from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from elastic_ray.sync.optimizer_tiles.moves import StateLostError
    from elastic_ray.sync.sharded.embedding import ShardedEmbedding
    from elastic_ray.sync.sharded.shard import RowsLostError

# Loaded on first use: builders and strategies load no torch.
_HOMES = {
    "elastic_ray.sync.optimizer_tiles.moves": "StateLostError",
    "elastic_ray.sync.sharded.embedding": "ShardedEmbedding",
    "elastic_ray.sync.sharded.shard": "RowsLostError",
}

__all__ = [
    "PS",
    "SMA",
    "AdaptiveSGD",
    "AllReduce",
    "Auto",
    "Average",
    "DiLoCo",
    "LocalSGD",
    "ModelProfile",
    "OptimizerInfo",
    "Owner",
    "PSLoadBalancing",
    "PairAveraging",
    "Parallax",
    "ParamInfo",
    "PartitionedAR",
    "PartitionedPS",
    "PowerSGD",
    "RandomAxisPartitionAR",
    "Reduce",
    "RowAdagrad",
    "RowAdam",
    "RowSGD",
    "Rows",
    "RowsLostError",
    "Rule",
    "ShardedEmbedding",
    "StateLostError",
    "Strategy",
    "StrategyBuilder",
    "StrategyError",
    "StrategyTable",
    "Topology",
    "UnevenPartitionedPS",
    "Wire",
    "ZeRO1",
    "ZeRO2",
]

__getattr__, _ = lazy_names(__name__, _HOMES)
