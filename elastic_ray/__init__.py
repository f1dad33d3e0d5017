"""elastic-ray: PyTorch jobs on Ray that grow, shrink and survive lost workers while they train."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ray.config import ElasticConfig, SchedulingConfig
    from elastic_ray.data.arrow import ArrowDataset
    from elastic_ray.data.loader import AdaptiveDataLoader
    from elastic_ray.driver.handle import JobHandle
    from elastic_ray.driver.trainer import ElasticTrainer
    from elastic_ray.events import EventKind, JobEvent, JobStatus
    from elastic_ray.parallel.wrapper import AdaptiveDataParallel
    from elastic_ray.session.accumulator import Accumulator
    from elastic_ray.session.api import (
        current_epoch,
        get_checkpoint,
        get_context,
        remaining_epochs_until,
        report,
    )

# Loaded on first use, so that the simulator and the allocator load neither Ray nor torch through this package.
_HOMES = {
    "Accumulator": "elastic_ray.session.accumulator",
    "AdaptiveDataLoader": "elastic_ray.data.loader",
    "AdaptiveDataParallel": "elastic_ray.parallel.wrapper",
    "ArrowDataset": "elastic_ray.data.arrow",
    "ElasticConfig": "elastic_ray.config",
    "ElasticTrainer": "elastic_ray.driver.trainer",
    "EventKind": "elastic_ray.events",
    "JobEvent": "elastic_ray.events",
    "JobHandle": "elastic_ray.driver.handle",
    "JobStatus": "elastic_ray.events",
    "SchedulingConfig": "elastic_ray.config",
    "current_epoch": "elastic_ray.session.api",
    "get_checkpoint": "elastic_ray.session.api",
    "get_context": "elastic_ray.session.api",
    "remaining_epochs_until": "elastic_ray.session.api",
    "report": "elastic_ray.session.api",
}

__all__ = [
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "ArrowDataset",
    "ElasticConfig",
    "ElasticTrainer",
    "EventKind",
    "JobEvent",
    "JobHandle",
    "JobStatus",
    "SchedulingConfig",
    "current_epoch",
    "get_checkpoint",
    "get_context",
    "remaining_epochs_until",
    "report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elastic_ray' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
