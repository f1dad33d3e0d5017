"""A strategy for ``lightning.Trainer``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, IterableDataset

import elastic_ray as er
from elastic_ray.integrations.batch_options import BatchOptions
from elastic_ray.integrations.lightning.fetcher import UnreadStream
from elastic_ray.integrations.lightning.loops import become_elastic, trains
from elastic_ray.integrations.lightning.shared import (
    ElasticRayEnvironment,
    OneDevice,
    accumulating,
    adaptive,
    decided,
    gathered,
    reduced,
    told,
)
from elastic_ray.integrations.overridden import check_overridden
from elastic_ray.loop.api import current_session, session_of_new_model

check_overridden(
    "lightning",
    "lightning",
    {
        Strategy: [
            *("setup", "setup_environment", "setup_optimizers", "setup_precision_plugin", "optimizer_step"),
            *("validation_step", "test_step", "predict_step", "process_dataloader", "handles_gradient_accumulation"),
        ],
        ParallelStrategy: ["parallel_devices", "distributed_sampler_kwargs", "block_backward_sync", "global_rank"],
    },
)


class ElasticRayStrategy(OneDevice, ParallelStrategy):
    """``Trainer(strategy=ElasticRayStrategy())``, within a train function.

    Training is the job's: it grows, shrinks and survives lost workers within ``fit``, each sample is used once an
    epoch, and callbacks, loop counters and what was logged go along. The ``train_dataloader``'s ``batch_size`` is that
    of all workers together. In evaluation every worker goes through all data, so that all have the same numbers.

    Args:
        max_batch_size: largest global batch [samples], as ``AdaptiveDataLoader.autoscale_batch_size`` takes it; the
            batch stays without.
        local_bsz_bounds: least and largest samples that one worker takes at once.
        gradient_accumulation: allow several micro-batches a step.
        checkpoint_io: as any strategy's.
        precision_plugin: as any strategy's.
        options: of ``AdaptiveDataParallel`` (``strategy=``, ``policy=``, ``scaling_rule=``, ...).

    Raises:
        ValueError: limits of a batch that has none.
    """

    strategy_name = "elastic_ray"
    model: Any
    _model: Any
    is_distributed = True  # else Lightning leaves out self.log(sync_dist=True)

    def __init__(
        self,
        *,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            cluster_environment=ElasticRayEnvironment(), checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        self._batch = BatchOptions(
            max_batch_size=max_batch_size,
            local_bsz_bounds=local_bsz_bounds,
            gradient_accumulation=gradient_accumulation,
        )
        self._options = options
        self._gone = self._writes = False

    @property
    def num_nodes(self) -> int:
        """1: the job knows of nodes."""
        return 1

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes != 1:
            raise ValueError(
                f"num_nodes must be 1, but got {nodes}: under elastic-ray ScalingConfig(num_workers=) says how many "
                "workers there are, on whichever nodes"
            )

    @property
    def is_global_zero(self) -> bool:
        """True if this worker writes files: rank 0 does, also of a training that failed (``OnExceptionCheckpoint``)."""
        return self._writes if self._gone else self.global_rank == 0

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True: our loader cuts micro-batches."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler arguments of evaluation: each worker uses all data."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Trainer) -> None:
        """Build the model, its optimizers and schedulers, and make them the job's.

        Raises:
            ValueError: the trainer or the module ask for what cannot be kept; the message says the way out.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        _check(trainer)
        self._take_over(trainer)
        self._gone = self._writes = False  # alone, a fit that failed may be followed by another
        session_of_new_model()  # alone, a second fit is a run of its own, whose loader begins anew
        become_elastic(trainer)
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_optimizers(trainer)
        self.model = er.AdaptiveDataParallel(
            self.model,
            self.optimizers,
            lr_scheduler=[config.scheduler for config in self.lr_scheduler_configs],
            grad_scaler=getattr(self.precision_plugin, "scaler", None),
            **self._options,
        )
        self.setup_precision_plugin()
        for module in self.lightning_module.modules() if self.lightning_module is not None else ():
            if isinstance(module, torchmetrics.Metric):
                self._synchronise(module)

    def _take_over(self, trainer: Any) -> None:
        """Have the job share out samples, cut micro-batches and show the progress, in place of Lightning."""
        theirs = trainer._accelerator_connector
        theirs.use_distributed_sampler = False
        theirs = trainer
        if trainer.accumulate_grad_batches != 1:  # of a second fit it is 1
            self._batch = dataclasses.replace(self._batch, accumulated=trainer.accumulate_grad_batches)
            theirs.accumulate_grad_batches = 1
        if trainer.progress_bar_callback is not None and current_session().elastic:
            trainer.progress_bar_callback.disable()

    def _synchronise(self, theirs: Any) -> None:
        """Have a metric be that of all workers' samples in training, where each has seen its share."""
        theirs.distributed_available_fn = lambda: self._shares and self.world_size > 1
        theirs.dist_sync_fn = lambda tensor, group=None: er.all_gather(tensor)

    @property
    def _shares(self) -> bool:
        """True if each worker has its share of the samples now; in evaluation each has all of them."""
        return not self._gone and self.lightning_module is not None and trains(self.lightning_module._trainer)

    def model_to_device(self) -> None:
        """Move the model to the worker's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a training loader whose batches all workers share; other loaders stay unchanged.

        Others stay as they are.

        Raises:
            TypeError: it gives batches of its own, which could not be shared.
        """
        if not self._shares:
            return dataloader
        if not isinstance(dataloader, (er.AdaptiveDataLoader, DataLoader)):
            raise TypeError(
                "train_dataloader must be a torch DataLoader or an elastic_ray.AdaptiveDataLoader, whose samples the "
                f"workers can share, but is a {type(dataloader).__name__}: put what it reads into a dataset"
            )
        loader = adaptive(dataloader, self._batch)
        return UnreadStream(loader) if isinstance(loader.dataset, IterableDataset) else loader

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Backward, and the step with its hooks and clipping where the micro-batch ends one."""
        if accumulating():
            return closure()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate as on one device."""
        with self._plain():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test as on one device."""
        with self._plain():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as on one device."""
        with self._plain():
            return super().predict_step(*args, **kwargs)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """The model without what wraps it: an evaluation is each worker's own."""
        wrapped, self._model = self._model, self._lightning_module
        try:
            yield
        finally:
            self._model = wrapped

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as ``elastic_ray.all_reduce`` in training; in evaluation all workers have seen the same."""
        return reduced(tensor, group, reduce_op) if self._shares else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather as ``elastic_ray.all_gather`` in training; in evaluation return this worker's tensor, stacked."""
        return gathered(tensor, group, sync_grads) if self._shares else tensor[None]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # Lightning's name
        """True if all workers, or any, decide so."""
        return decision if self._gone else decided(decision, all)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers as ``elastic_ray.barrier``."""
        if not self._gone:
            er.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast as ``elastic_ray.broadcast``: tensors and plain values, never pickled."""
        return obj if self._gone else told(obj, src)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients of the block stay on this rank."""
        if isinstance(self.model, er.AdaptiveDataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    def leave(self, *, goes_on: bool) -> None:
        """Leave the job, or fail: this worker takes part in no more collectives.

        Args:
            goes_on: whether the job continues without it, so that files are others' to write.
        """
        self._gone, self._writes = True, not goes_on and self.global_rank == 0


def _check(trainer: Any) -> None:
    """Raise ValueError for what cannot be kept when workers come and go."""

    def has(kind: type) -> bool:
        return any(isinstance(each, kind) for each in trainer.callbacks)

    asked = {
        "GradientAccumulationScheduler": has(GradientAccumulationScheduler),
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs,
        "sync_batchnorm": trainer._accelerator_connector._layer_sync is not None,
        "StochasticWeightAveraging": has(StochasticWeightAveraging),
        "LearningRateFinder": has(LearningRateFinder),
        "a second fit() in a job": current_session().synced and current_session().elastic,
    }
    for name, way_out in _REFUSED.items():
        if asked[name]:
            raise ValueError(f"{name} cannot be kept under elastic-ray: {way_out}")


_REFUSED = {
    "a second fit() in a job": (
        "workers that join later could not tell which of them the others are in: train all epochs in one fit(), or "
        "submit a job each"
    ),
    "sync_batchnorm": (
        "it needs a process group that does not change: BatchNorm's statistics are averaged over the workers at the "
        "end of each pass; or use GroupNorm or LayerNorm"
    ),
    "StochasticWeightAveraging": (
        "it replaces schedulers within the training, of which workers that join would know nothing: "
        "lightning.pytorch.callbacks.EMAWeightAveraging works"
    ),
    "LearningRateFinder": "it trains by itself before the job does: look for the rate in a script of its own",
    "GradientAccumulationScheduler": (
        "the job cuts micro-batches by itself: pass Trainer(accumulate_grad_batches=), or let the batch grow by "
        "ElasticRayStrategy(max_batch_size=, gradient_accumulation=True)"
    ),
    "reload_dataloaders_every_n_epochs": (
        "joiners would miss what earlier loaders have used: change the dataset in AdaptiveDataLoader(on_epoch=), and "
        "return that from train_dataloader()"
    ),
}
