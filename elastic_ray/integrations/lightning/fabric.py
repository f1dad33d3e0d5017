"""A strategy for Lightning Fabric, whose users write their own training loops."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import Strategy, _BackwardSyncControl
from torch.utils.data import DataLoader

import elastic_ray as er
from elastic_ray.integrations.batch_options import BatchOptions
from elastic_ray.integrations.late_wrapping import plain_model
from elastic_ray.integrations.lightning.shared import ElasticRayEnvironment, OneDevice, accumulating, adaptive, reduced
from elastic_ray.integrations.overridden import check_overridden

check_overridden(
    "lightning",
    "lightning",
    {
        Strategy: [
            "setup_module_and_optimizers",
            "process_dataloader",
            "get_module_state_dict",
            "load_module_state_dict",
            "clip_gradients_norm",
            "clip_gradients_value",
            "_err_msg_joint_setup_required",
        ],
        ParallelStrategy: ["parallel_devices", "distributed_sampler_kwargs", "reduce_boolean_decision"],
    },
)


class ElasticRayFabricStrategy(OneDevice, ParallelStrategy):
    """Strategy for a Fabric loop in a train function: ``Fabric(strategy=ElasticRayFabricStrategy())``.

    Set up the model, its optimizers and its scheduler in one call,
    ``fabric.setup(model, optimizer, scheduler=scheduler)``, and iterate over ``elastic_ray.remaining_epochs_until(n)``.
    ``fabric.setup_dataloaders`` returns loaders whose ``batch_size`` is the global batch, which is divided between all
    workers.

    Args:
        max_batch_size: Largest global batch [samples] of the first loader that is set up, as in
            ``AdaptiveDataLoader.autoscale_batch_size``. None keeps its batch fixed; other loaders always keep theirs.
        local_bsz_bounds: Fewest and most samples that one worker processes at once; None if unbounded.
        gradient_accumulation: True if a step may have several micro-batches.
        options: Arguments of ``AdaptiveDataParallel`` (``strategy=``, ``policy=``, ``scaling_rule=``, ...).

    Raises:
        ValueError: Other batch options are given without ``max_batch_size``.
    """

    def __init__(
        self,
        *,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(cluster_environment=ElasticRayEnvironment())
        self._batch = BatchOptions(
            max_batch_size=max_batch_size,
            local_bsz_bounds=local_bsz_bounds,
            gradient_accumulation=gradient_accumulation,
        )
        self._options = options
        self._backward_sync_control = _BackwardSync()

    @property
    def distributed_sampler_kwargs(self) -> None:
        """Always None, so that Fabric adds no sampler, because the loaders divide their samples themselves."""

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Any]:
        """Wrap the model with its optimizers; return the wrapped model, the optimizers and the scheduler."""
        scaler = getattr(self.precision, "scaler", None)
        wrapped = er.AdaptiveDataParallel(
            module, optimizers, lr_scheduler=scheduler, grad_scaler=scaler, **self._options
        )
        return wrapped, optimizers, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Raise RuntimeError, because a model and its optimizer must be set up together."""
        raise RuntimeError(self._err_msg_joint_setup_required())

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move the model to the worker's device."""
        module.to(self.root_device)

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """Return a loader that divides the batches of ``dataloader`` (now global batches) between all workers."""
        loader = adaptive(dataloader, self._batch)
        self._batch = BatchOptions()  # one loader of a train loop adapts
        return loader

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over all ranks, as ``elastic_ray.all_reduce`` does."""
        return reduced(tensor, group, reduce_op)

    def clip_gradients_norm(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Clip gradients by norm and return the norm; while gradients accumulate, do nothing and return 0."""
        if accumulating():
            return torch.zeros(())
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: Any) -> None:
        """Clip gradients by value; do nothing while gradients are still being accumulated."""
        if not accumulating():
            super().clip_gradients_value(module, optimizer, clip_val)

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict of the unwrapped model, which any other strategy can load."""
        return super().get_module_state_dict(plain_model(module))

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a state dict into the unwrapped model."""
        super().load_module_state_dict(plain_model(module), state_dict, strict)


class _BackwardSync(_BackwardSyncControl):
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context that disables gradient averaging over ranks if ``enabled``, otherwise an empty context."""
        if not isinstance(module, er.AdaptiveDataParallel):
            raise TypeError(f"no_backward_sync() takes what fabric.setup() gave, but got {type(module).__name__}")
        return module.no_sync() if enabled else nullcontext()
