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
    from elastic_ray.access import AccessRefusedError
    from elastic_ray.batch.tuner import BatchDoesNotFitError
    from elastic_ray.checkpoints.sharded.model_loading import load_model_state
    from elastic_ray.communication.communicator import CommunicationFailedError
    from elastic_ray.config import ElasticConfig, SchedulingConfig
    from elastic_ray.consensus.intents import RanksDisagreeError
    from elastic_ray.data.arrow import ArrowDataset
    from elastic_ray.data.loader import AdaptiveDataLoader
    from elastic_ray.driver.handle import JobHandle
    from elastic_ray.driver.replay import replay
    from elastic_ray.driver.run_config import RunConfig
    from elastic_ray.driver.sharded_memory import sharded_memory
    from elastic_ray.driver.trainer import ElasticTrainer
    from elastic_ray.errors import (
        ImpossibleResourcesError,
        JobLostError,
        JobNameTakenError,
        TrainFunctionError,
        WorkersLostError,
    )
    from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus, Report, WorkerInfo
    from elastic_ray.faults import Faults
    from elastic_ray.integrations.ray_data import get_dataset_shard
    from elastic_ray.loop.accumulator import Accumulator
    from elastic_ray.loop.api import (
        current_epoch,
        get_checkpoint,
        get_context,
        get_tracker_dir,
        register_state,
        report,
    )
    from elastic_ray.loop.collectives import all_gather, all_reduce, barrier, broadcast
    from elastic_ray.loop.epochs import Epochs, remaining_epochs_until
    from elastic_ray.parallel.nonfinite import NonFiniteGradientsError, NonFiniteParametersError
    from elastic_ray.parallel.wrapper import AdaptiveDataParallel
    from elastic_ray.state.layout import ReplicasDifferError
    from elastic_ray.state.tree import UnsafeStateError
    from elastic_ray.sync.row_changes import change_parameters
    from elastic_ray.sync.sharded_parameters.fully_shard import fully_shard
    from placement.cluster.memory_need import MemoryNeed
    from placement.storage.private_files import ForeignDirectoryError
    from placement.storage.storage_calls import StorageTimeoutError

# Loaded on first use, so that the simulator and the allocator load neither Ray nor torch through this package.
_HOMES = {
    "AccessRefusedError": "elastic_ray.access",
    "Accumulator": "elastic_ray.loop.accumulator",
    "AdaptiveDataLoader": "elastic_ray.data.loader",
    "AdaptiveDataParallel": "elastic_ray.parallel.wrapper",
    "ArrowDataset": "elastic_ray.data.arrow",
    "BatchDoesNotFitError": "elastic_ray.batch.tuner",
    "CommunicationFailedError": "elastic_ray.communication.communicator",
    "ElasticConfig": "elastic_ray.config",
    "ElasticTrainer": "elastic_ray.driver.trainer",
    "Epochs": "elastic_ray.loop.epochs",
    "EventKind": "elastic_ray.events",
    "Faults": "elastic_ray.faults",
    "ForeignDirectoryError": "placement.storage.private_files",
    "ImpossibleResourcesError": "elastic_ray.errors",
    "JobEvent": "elastic_ray.events",
    "JobHandle": "elastic_ray.driver.handle",
    "JobLostError": "elastic_ray.errors",
    "JobNameTakenError": "elastic_ray.errors",
    "JobPhase": "elastic_ray.events",
    "JobStatus": "elastic_ray.events",
    "MemoryNeed": "placement.cluster.memory_need",
    "NonFiniteGradientsError": "elastic_ray.parallel.nonfinite",
    "NonFiniteParametersError": "elastic_ray.parallel.nonfinite",
    "RanksDisagreeError": "elastic_ray.consensus.intents",
    "ReplicasDifferError": "elastic_ray.state.layout",
    "Report": "elastic_ray.events",
    "RunConfig": "elastic_ray.driver.run_config",
    "SchedulingConfig": "elastic_ray.config",
    "StorageTimeoutError": "placement.storage.storage_calls",
    "TrainFunctionError": "elastic_ray.errors",
    "UnsafeStateError": "elastic_ray.state.tree",
    "WorkerInfo": "elastic_ray.events",
    "WorkersLostError": "elastic_ray.errors",
    "all_gather": "elastic_ray.loop.collectives",
    "all_reduce": "elastic_ray.loop.collectives",
    "barrier": "elastic_ray.loop.collectives",
    "broadcast": "elastic_ray.loop.collectives",
    "change_parameters": "elastic_ray.sync.row_changes",
    "current_epoch": "elastic_ray.loop.api",
    "fully_shard": "elastic_ray.sync.sharded_parameters.fully_shard",
    "get_checkpoint": "elastic_ray.loop.api",
    "get_context": "elastic_ray.loop.api",
    "get_dataset_shard": "elastic_ray.integrations.ray_data",
    "get_tracker_dir": "elastic_ray.loop.api",
    "load_model_state": "elastic_ray.checkpoints.sharded.model_loading",
    "register_state": "elastic_ray.loop.api",
    "remaining_epochs_until": "elastic_ray.loop.epochs",
    "replay": "elastic_ray.driver.replay",
    "report": "elastic_ray.loop.api",
    "sharded_memory": "elastic_ray.driver.sharded_memory",
}

__all__ = [
    "AccessRefusedError",
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "ArrowDataset",
    "BatchDoesNotFitError",
    "CommunicationFailedError",
    "ElasticConfig",
    "ElasticTrainer",
    "Epochs",
    "EventKind",
    "Faults",
    "ForeignDirectoryError",
    "ImpossibleResourcesError",
    "JobEvent",
    "JobHandle",
    "JobLostError",
    "JobNameTakenError",
    "JobPhase",
    "JobStatus",
    "MemoryNeed",
    "NonFiniteGradientsError",
    "NonFiniteParametersError",
    "RanksDisagreeError",
    "ReplicasDifferError",
    "Report",
    "RunConfig",
    "SchedulingConfig",
    "StorageTimeoutError",
    "TrainFunctionError",
    "UnsafeStateError",
    "WorkerInfo",
    "WorkersLostError",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "change_parameters",
    "current_epoch",
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
]

__version__ = RELEASE
__getattr__, __dir__ = lazy_names("elastic_ray", _HOMES)
