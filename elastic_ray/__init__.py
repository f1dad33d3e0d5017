"""elastic-ray: PyTorch jobs on Ray that grow, shrink and survive lost workers while they train."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from placement.lazy_names import lazy_names
    from placement.versions import RELEASE
except ImportError as error:  # whose placement is it? A script's folder comes before ours
    import placement

    raise ImportError(
        f"elastic-ray's package placement is hidden by {placement.__file__ or list(placement.__path__)}: rename that "
        "file or folder, or run Python in another directory"
    ) from error

if TYPE_CHECKING:
    from elastic_ray import adaptation as adaptation
    from elastic_ray import errors as errors
    from elastic_ray import events as events
    from elastic_ray import faults as faults
    from elastic_ray import sync as sync
    from elastic_ray.checkpoints.sharded.model_loading import load_model_state
    from elastic_ray.config import ElasticConfig, SchedulingConfig
    from elastic_ray.data.loader import AdaptiveDataLoader
    from elastic_ray.data.packing import PackedDataset
    from elastic_ray.driver.handle import JobHandle
    from elastic_ray.driver.replay import replay
    from elastic_ray.driver.run_config import RunConfig
    from elastic_ray.driver.sharded_memory import sharded_memory
    from elastic_ray.driver.trainer import ElasticTrainer
    from elastic_ray.integrations.ray_data import get_dataset_shard
    from elastic_ray.loop.accumulator import Accumulator
    from elastic_ray.loop.api import get_checkpoint, get_context, get_tracker_dir, register_state, report, unit_mesh
    from elastic_ray.loop.collectives import all_gather, all_reduce, barrier, broadcast
    from elastic_ray.loop.epochs import remaining_epochs_until
    from elastic_ray.parallel.wrapper import AdaptiveDataParallel
    from elastic_ray.sync.sharded_parameters.fully_shard import fully_shard
    from elastic_ray.unit import Unit

# Loaded on first use, so that the simulator and the allocator load neither Ray nor torch through this package.
_HOMES = {
    "elastic_ray.checkpoints.sharded.model_loading": "load_model_state",
    "elastic_ray.config": "ElasticConfig SchedulingConfig",
    "elastic_ray.data.loader": "AdaptiveDataLoader",
    "elastic_ray.data.packing": "PackedDataset",
    "elastic_ray.driver.handle": "JobHandle",
    "elastic_ray.driver.replay": "replay",
    "elastic_ray.driver.run_config": "RunConfig",
    "elastic_ray.driver.sharded_memory": "sharded_memory",
    "elastic_ray.driver.trainer": "ElasticTrainer",
    "elastic_ray.integrations.ray_data": "get_dataset_shard",
    "elastic_ray.loop.accumulator": "Accumulator",
    "elastic_ray.loop.api": "get_checkpoint get_context get_tracker_dir register_state report unit_mesh",
    "elastic_ray.loop.collectives": "all_gather all_reduce barrier broadcast",
    "elastic_ray.loop.epochs": "remaining_epochs_until",
    "elastic_ray.parallel.wrapper": "AdaptiveDataParallel",
    "elastic_ray.sync.sharded_parameters.fully_shard": "fully_shard",
    "elastic_ray.unit": "Unit",
}

__all__ = [
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "ElasticConfig",
    "ElasticTrainer",
    "JobHandle",
    "PackedDataset",
    "RunConfig",
    "SchedulingConfig",
    "Unit",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "fully_shard",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_tracker_dir",
    "load_model_state",
    "register_state",
    "remaining_epochs_until",
    "replay",
    "report",
    "sharded_memory",
    "unit_mesh",
]

__version__ = RELEASE
__getattr__, __dir__ = lazy_names("elastic_ray", _HOMES, ("adaptation", "errors", "events", "faults", "sync"))
