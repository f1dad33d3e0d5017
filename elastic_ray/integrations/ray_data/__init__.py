"""Ray Data datasets in an elastic job: ``ElasticTrainer(datasets=...)`` and ``get_dataset_shard``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from elastic_ray.integrations.ray_data.shard import RayDataShard, get_dataset_shard

_SHARD = "elastic_ray.integrations.ray_data.shard"  # imports torch, which drivers and a sweep's trials do without

__all__ = ["RayDataShard", "get_dataset_shard"]

__getattr__, __dir__ = lazy_names(__name__, {_SHARD: " ".join(__all__)})
