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
    from elastic_ray.batch.branch_losses import BranchError, BranchResult
    from elastic_ray.batch.tuner import BatchDoesNotFitError
    from elastic_ray.checkpoints.sharded.model_loading import load_model_state
    from elastic_ray.communication.communicator import CommunicationFailedError
    from elastic_ray.config import ElasticConfig, SchedulingConfig
    from elastic_ray.consensus.intents import RanksDisagreeError
    from elastic_ray.data.arrow import ArrowDataset
    from elastic_ray.data.loader import AdaptiveDataLoader
    from elastic_ray.data.packing import PackedDataset
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
        unit_mesh,
    )
    from elastic_ray.loop.collectives import all_gather, all_reduce, barrier, broadcast
    from elastic_ray.loop.epochs import Epochs, remaining_epochs_until
    from elastic_ray.parallel.nonfinite import NonFiniteGradientsError, NonFiniteParametersError
    from elastic_ray.parallel.wrapper import AdaptiveDataParallel
    from elastic_ray.state.layout import ReplicasDifferError
    from elastic_ray.state.tree import UnsafeStateError
    from elastic_ray.sync.row_changes import change_parameters
    from elastic_ray.sync.sharded_parameters.fully_shard import fully_shard
    from elastic_ray.unit import Unit
    from placement.cluster.memory_need import MemoryNeed
    from placement.storage.private_files import ForeignDirectoryError
    from placement.storage.storage_calls import StorageTimeoutError

# Loaded on first use, so that the simulator and the allocator load neither Ray nor torch through this package.
_HOMES = {
    "elastic_ray.access": "AccessRefusedError",
    "elastic_ray.batch.branch_losses": "BranchError BranchResult",
    "elastic_ray.batch.tuner": "BatchDoesNotFitError",
    "elastic_ray.checkpoints.sharded.model_loading": "load_model_state",
    "elastic_ray.communication.communicator": "CommunicationFailedError",
    "elastic_ray.config": "ElasticConfig SchedulingConfig",
    "elastic_ray.consensus.intents": "RanksDisagreeError",
    "elastic_ray.data.arrow": "ArrowDataset",
    "elastic_ray.data.loader": "AdaptiveDataLoader",
    "elastic_ray.data.packing": "PackedDataset",
    "elastic_ray.driver.handle": "JobHandle",
    "elastic_ray.driver.replay": "replay",
    "elastic_ray.driver.run_config": "RunConfig",
    "elastic_ray.driver.sharded_memory": "sharded_memory",
    "elastic_ray.driver.trainer": "ElasticTrainer",
    "elastic_ray.errors": "ImpossibleResourcesError JobLostError JobNameTakenError TrainFunctionError WorkersLostError",
    "elastic_ray.events": "EventKind JobEvent JobPhase JobStatus Report WorkerInfo",
    "elastic_ray.faults": "Faults",
    "elastic_ray.integrations.ray_data": "get_dataset_shard",
    "elastic_ray.loop.accumulator": "Accumulator",
    "elastic_ray.loop.api": "current_epoch get_checkpoint get_context get_tracker_dir register_state report unit_mesh",
    "elastic_ray.loop.collectives": "all_gather all_reduce barrier broadcast",
    "elastic_ray.loop.epochs": "Epochs remaining_epochs_until",
    "elastic_ray.parallel.nonfinite": "NonFiniteGradientsError NonFiniteParametersError",
    "elastic_ray.parallel.wrapper": "AdaptiveDataParallel",
    "elastic_ray.state.layout": "ReplicasDifferError",
    "elastic_ray.state.tree": "UnsafeStateError",
    "elastic_ray.sync.row_changes": "change_parameters",
    "elastic_ray.sync.sharded_parameters.fully_shard": "fully_shard",
    "elastic_ray.unit": "Unit",
    "placement.cluster.memory_need": "MemoryNeed",
    "placement.storage.private_files": "ForeignDirectoryError",
    "placement.storage.storage_calls": "StorageTimeoutError",
}

__all__ = [
    "AccessRefusedError",
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "ArrowDataset",
    "BatchDoesNotFitError",
    "BranchError",
    "BranchResult",
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
    "PackedDataset",
    "RanksDisagreeError",
    "ReplicasDifferError",
    "Report",
    "RunConfig",
    "SchedulingConfig",
    "StorageTimeoutError",
    "TrainFunctionError",
    "Unit",
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
    "unit_mesh",
]

__version__ = RELEASE
__getattr__, __dir__ = lazy_names("elastic_ray", _HOMES)
