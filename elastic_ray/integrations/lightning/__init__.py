"""Lightning integration: a strategy for ``lightning.Trainer``, and another for Fabric."""

from __future__ import annotations

from elastic_ray.integrations.lightning.fabric import ElasticRayFabricStrategy
from elastic_ray.integrations.lightning.strategy import ElasticRayStrategy

__all__ = ["ElasticRayFabricStrategy", "ElasticRayStrategy"]
