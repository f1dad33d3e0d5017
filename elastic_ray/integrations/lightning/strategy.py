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
from elastic_ray.integrations.lightning.shared import ElasticRayEnvironment, OneDevice, accumulating, adaptive, reduced
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
    """Strategy for ``lightning.Trainer`` in a train function: ``Trainer(strategy=ElasticRayStrategy())``.

    The job grows, shrinks and survives lost workers within ``fit``. Each sample is used once per epoch, and callbacks,
    loop counters and logged values are preserved. The ``train_dataloader``'s ``batch_size`` is the global batch, which
    is divided between all workers. Every worker evaluates all the data, so all workers have the same results.

    Args:
        max_batch_size: Largest global batch [samples], as in ``AdaptiveDataLoader.autoscale_batch_size``. None keeps
            the batch fixed.
        local_bsz_bounds: Fewest and most samples that one worker processes at once; None if unbounded.
        gradient_accumulation: True if a step may have several micro-batches.
        checkpoint_io: Same as in other Lightning strategies.
        precision_plugin: Same as in other Lightning strategies.
        options: Arguments of ``AdaptiveDataParallel`` (``strategy=``, ``policy=``, ``scaling_rule=``, ...).

    Raises:
        ValueError: Other batch options are given without ``max_batch_size``.
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
        self._writes = False

    @property
    def num_nodes(self) -> int:
        """Always 1, because the job manages the nodes."""
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
        """True if this worker writes files: it is rank 0, or was when training failed (``OnExceptionCheckpoint``)."""
        return self._writes if self._gone else self.global_rank == 0

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True, because the loader splits steps into micro-batches."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for Lightning's evaluation sampler that make each worker evaluate all the data."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Trainer) -> None:
        """Build the model, its optimizers and schedulers, and register them with the job.

        Raises:
            ValueError: The trainer or module uses an unsupported feature; the message names an alternative.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        _check(trainer)
        self._adopt_trainer(trainer)
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
                # In training, where each worker sees only its share, a metric covers the samples of all.
                module.distributed_available_fn = lambda: self._shares and self.world_size > 1
                module.dist_sync_fn = lambda tensor, group=None: er.all_gather(tensor)

    def _adopt_trainer(self, trainer: Any) -> None:
        """Turn off Lightning's sampler, gradient accumulation and progress bar, because the job handles them."""
        theirs = trainer._accelerator_connector
        theirs.use_distributed_sampler = False
        theirs = trainer
        if trainer.accumulate_grad_batches != 1:  # of a second fit it is 1
            self._batch = dataclasses.replace(self._batch, accumulated=trainer.accumulate_grad_batches)
            theirs.accumulate_grad_batches = 1
        if trainer.progress_bar_callback is not None and current_session().elastic:
            trainer.progress_bar_callback.disable()

    @property
    def _shares(self) -> bool:
        """True while each worker gets a share of the samples; in evaluation each worker gets all of them."""
        return not self._gone and self.lightning_module is not None and trains(self.lightning_module._trainer)

    def model_to_device(self) -> None:
        """Move the model to the worker's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a training loader that divides its batches between all workers; return other loaders unchanged.

        Raises:
            TypeError: The training loader has a different type, whose samples cannot be divided between workers.
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
        """Run backward and, on a step's last micro-batch, the optimizer step with its hooks and clipping."""
        if accumulating():
            return closure()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation step as on a single device."""
        with self._plain():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a test step as on a single device."""
        with self._plain():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prediction step as on a single device."""
        with self._plain():
            return super().predict_step(*args, **kwargs)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Use the unwrapped model inside the block, because each worker evaluates independently."""
        wrapped, self._model = self._model, self._lightning_module
        try:
            yield
        finally:
            self._model = wrapped

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a value reduced like ``elastic_ray.all_reduce`` in training; in evaluations, return it unchanged."""
        return reduced(tensor, group, reduce_op) if self._shares else tensor

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context where gradients accumulate on this rank, without averaging over ranks."""
        if isinstance(self.model, er.AdaptiveDataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    def leave(self, *, goes_on: bool) -> None:
        """Exclude this worker from all further collectives, because it is leaving the job or failing.

        Args:
            goes_on: True if the job continues without this worker, so that another worker writes the files.
        """
        self._gone, self._writes = True, not goes_on and self.global_rank == 0


def _check(trainer: Any) -> None:
    """Raise ValueError for trainer settings that are not supported while workers join and leave."""

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
            raise ValueError(f"{name} is not supported under elastic-ray: {way_out}")


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
        "joiners would miss what earlier loaders have used: change the dataset in on_train_epoch_start(), which they "
        "call as well"
    ),
}
