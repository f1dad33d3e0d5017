"""Datasets of Ray Data in an elastic job: ``ElasticTrainer(datasets=...)`` and ``get_dataset_shard``."""

from elastic_ray.integrations.ray_data.shard import RayDataShard, get_dataset_shard

__all__ = ["RayDataShard", "get_dataset_shard"]
