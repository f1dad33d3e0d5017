"""``accelerate.Accelerator`` for custom training loops in elastic jobs."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

import elastic_ray as er
from elastic_ray.data.resumable import resume_at
from elastic_ray.integrations.batch_options import BatchOptions
from elastic_ray.integrations.huggingface.arguments import check_options
from elastic_ray.integrations.huggingface.collectives import Collectives, read_position, write_position
from elastic_ray.integrations.huggingface.prepared import AccelerateLoader, AccelerateModel, step_through_ours
from elastic_ray.integrations.late_wrapping import plain_model
from elastic_ray.integrations.overridden import check_overridden
from elastic_ray.loop.api import current_session, get_context, session_of_new_model
from elastic_ray.run.registry import HookPoint


class OnMainProcess(accelerate.Accelerator):
    """Mixin with the methods of ``Accelerator`` that run only on certain ranks of the job."""

    _trackers_wanted: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run on rank 0 only."""
        return self._where(function, lambda: get_context().get_world_rank() == 0)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run on the first worker of each node only."""
        return self._where(function, lambda: get_context().get_local_rank() == 0)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorate a function to run on the last rank only."""
        return self._where(function, lambda: get_context().get_world_rank() + 1 == get_context().get_world_size())

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on rank ``process_index`` only."""
        return self._where(function, lambda: get_context().get_world_rank() == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function to run only on each node's worker with local rank ``local_process_index``."""
        return self._where(function, lambda: get_context().get_local_rank() == local_process_index)

    def _where(self, function: Callable[..., Any] | None, here: Callable[[], bool]) -> Any:
        """Return `function`, or a decorator for it, that runs only if ``here()`` is true; otherwise it returns None."""
        if function is None:
            return functools.partial(self._where, here=here)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return called

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a message on the first worker of each node."""
        if get_context().get_local_rank() == 0:
            print(*args, **kwargs)

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Start trackers on rank 0."""
        self._trackers_wanted = args, kwargs
        if get_context().get_world_rank() == 0:
            super().init_trackers(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log metrics to the trackers on rank 0."""
        if get_context().get_world_rank() == 0:
            if self._trackers_wanted is not None and not self.trackers:
                again, options = self._trackers_wanted
                super().init_trackers(*again, **options)
            super().log(*args, **kwargs)


check_overridden(
    "accelerate",
    "huggingface",
    {
        accelerate.Accelerator: [
            *("prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler", "gather", "gather_for_metrics"),
            *("reduce", "pad_across_processes", "no_sync", "accumulate", "unwrap_model", "get_state_dict", "save"),
            *("save_state", "load_state", "wait_for_everyone", "check_trigger", "set_trigger", "main_process_first"),
            *("local_main_process_first", "register_for_checkpointing", "unscale_gradients", "clip_grad_norm_"),
            "clip_grad_value_",
        ]
    },
)


class Accelerator(OnMainProcess, Collectives):
    """``accelerate.Accelerator`` for a train function that iterates over ``elastic_ray.remaining_epochs_until(n)``.

    ``prepare`` accepts models, optimizers and schedulers in one call or in several. A loader's ``batch_size`` is the
    global batch, which is divided between all workers. Collectives such as ``gather``, ``gather_for_metrics`` and
    ``reduce`` accept tensors and plain values, and never pickle.

    Args:
        max_batch_size: Largest global batch [samples] of the first loader that is prepared, as in
            ``AdaptiveDataLoader.autoscale_batch_size``. None keeps its batch fixed; other loaders always keep theirs.
        local_bsz_bounds: Fewest and most samples that one worker processes at once; None if unbounded.
        gradient_accumulation: True if a step may have several micro-batches.
        elastic_options: Arguments of ``AdaptiveDataParallel`` (``strategy``, ``policy``, ``scaling_rule``, ...).
        options: Arguments of ``accelerate.Accelerator``. ``gradient_accumulation_steps`` multiplies the batch of the
            first loader that is prepared; no worker processes more than the original batch at once.

    Raises:
        ValueError: An argument is not supported while workers join and leave.
    """

    _models: list[Any]
    _custom_objects: list[Any]

    def __init__(
        self,
        *,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
        elastic_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_options(options)
        plugin: accelerate.utils.GradientAccumulationPlugin | None = options.pop("gradient_accumulation_plugin", None)
        if plugin is None:
            asked = options.pop("gradient_accumulation_steps", 1)
            asked = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", asked))  # accelerate's own order
        else:
            asked = plugin.num_steps
        # The job cuts a step's batch, and weighs the loss of each part.
        options["gradient_accumulation_plugin"] = accelerate.utils.GradientAccumulationPlugin(num_steps=1)
        super().__init__(**options)
        self._batch_options = BatchOptions(
            max_batch_size=max_batch_size,
            local_bsz_bounds=local_bsz_bounds,
            gradient_accumulation=gradient_accumulation,
            accumulated=asked,
        )
        if self.state.num_processes > 1:
            raise ValueError(
                "torchrun or accelerate launch has set up processes of its own here: the job starts workers, each of "
                "them a process of its own"
            )
        self._elastic_options = elastic_options or {}

    @property
    def num_processes(self) -> int:
        """Number of workers in the current group."""
        return get_context().get_world_size()

    @property
    def process_index(self) -> int:
        """Rank of this worker."""
        return get_context().get_world_rank()

    @property
    def local_process_index(self) -> int:
        """Rank of this worker on its node."""
        return get_context().get_local_rank()

    @property
    def is_main_process(self) -> bool:
        """True if this worker is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True if this worker is the first on its node."""
        return self.local_process_index == 0

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Return the objects prepared for an elastic job, in the same order.

        Raises:
            ValueError: Raised when training starts, if an optimizer was prepared but its model was not.
        """
        places = device_placement if device_placement is not None else [None] * len(args)
        if len(places) != len(args):
            raise ValueError(f"device_placement must have one entry for each of {len(args)} objects, not {len(places)}")
        result = tuple(self._prepare_one(*pair) for pair in zip(args, places, strict=True))
        return result if len(result) > 1 else result[0]

    def _prepare_one(self, each: Any, device_placement: bool | None) -> Any:
        """Prepare one object; objects that are not part of training are returned unchanged."""
        if isinstance(each, torch.nn.Module):
            return self.prepare_model(each, device_placement)
        if isinstance(each, AccelerateLoader):
            return each
        if isinstance(each, (DataLoader, er.AdaptiveDataLoader)):
            return self.prepare_data_loader(each)
        if isinstance(each, torch.optim.Optimizer):
            theirs = self.prepare_optimizer(each, device_placement)
        elif isinstance(each, (LRScheduler, ReduceLROnPlateau)):
            theirs = self.prepare_scheduler(each)
        else:
            return each
        theirs._is_accelerate_prepared = True  # what asks for it is accelerate
        return theirs

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return a model that is wrapped with its optimizer when training starts, for gradient averaging.

        With ``evaluation_mode``, the model is never wrapped.
        """
        known = [each for each in self._models if each is model or plain_model(each) is model]
        if known:
            return known[0]
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if evaluation_mode:
            return prepared
        self._models[-1] = AccelerateModel(prepared, self._wrap)
        return self._models[-1]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return the optimizer prepared for an elastic job; its model must be prepared too before training starts."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            own = weakref.ref(self)

            def wrap() -> None:
                accelerator = own()
                if accelerator is not None:
                    accelerator._wrap_models()

            session_of_new_model().registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, wrap)
        return super().prepare_optimizer(optimizer, device_placement)

    def _wrap_models(self) -> None:
        """Wrap each model whose optimizer was prepared; raise ValueError for an optimizer without a prepared model."""
        models = [each for each in self._models if isinstance(each, AccelerateModel)]
        for optimizer in self._optimizers:
            own = [each for each in models if _steps(optimizer, each.module)]
            if not own:
                raise ValueError(
                    f"a {type(optimizer.optimizer).__name__} was prepared, but the model whose parameters it steps was "
                    "not, so that each worker would train one of its own: "
                    "model, optimizer = accelerator.prepare(model, optimizer)"
                )
            own[0].wrap()

    def _wrap(self, module: torch.nn.Module) -> er.AdaptiveDataParallel | None:
        """Return a prepared model wrapped with its optimizers and schedulers, or None if it has no optimizer."""
        optimizers = [each for each in self._optimizers if _steps(each, module)]
        if not optimizers:
            return None
        plain = [each.optimizer for each in optimizers]
        schedulers = [each.scheduler for each in self._schedulers]
        followers = [each for each in schedulers if any(_stepped_by(each) is its for its in plain)]
        wrapper = er.AdaptiveDataParallel(
            module, plain, lr_scheduler=followers, grad_scaler=self.scaler, **self._elastic_options
        )
        for each in optimizers:
            step_through_ours(each)
        return wrapper

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> AccelerateLoader:
        """Return a loader that divides the batches of ``data_loader`` (now global batches) between all workers."""
        seed = self.dataloader_config.data_seed or 0
        loader = self._batch_options.shared(data_loader, seed=seed)
        self._batch_options.apply(loader)
        self._batch_options = BatchOptions()  # one loader of a train loop adapts
        self._dataloaders.append(AccelerateLoader(loader, self, self._optimizers))
        return self._dataloaders[-1]

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients before an optimizer step; do nothing while gradients are still being accumulated."""
        if self.sync_gradients:
            super().unscale_gradients(optimizer)

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        """Clip gradients as accelerate does; while gradients are still being accumulated, do nothing and return 0."""
        return super().clip_grad_norm_(*args, **kwargs) if self.sync_gradients else torch.zeros(())

    def clip_grad_value_(self, *args: Any, **kwargs: Any) -> None:
        """Clip gradients as accelerate does; do nothing while gradients are still being accumulated."""
        if self.sync_gradients:
            super().clip_grad_value_(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Return a context where gradients of ``model`` accumulate on this worker, without being averaged."""
        with model.no_sync():
            yield

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Do nothing; the job splits steps into micro-batches, and :attr:`sync_gradients` is True on the last one."""
        yield

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the user's original model, without the wrapper that :meth:`prepare` added."""
        return super().unwrap_model(plain_model(model), *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the state dict of the user's original model, without the wrapper's prefixes."""
        return super().get_state_dict(plain_model(model), unwrap)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object on rank 0."""
        if self.is_main_process:
            super().save(obj, f, safe_serialization)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save the training state and the data position to a folder, on rank 0 only; return the folder."""
        if not self.is_main_process:
            return output_dir
        if self.project_configuration.automatic_checkpoint_naming:
            self._number_the_next_state()
        with self._plain_models(), self._alone():
            folder = super().save_state(output_dir, *args, **kwargs)
        write_position(Path(folder))
        return folder

    def _number_the_next_state(self) -> None:
        """Continue numbering after the states in the folder; accelerate counts only states saved by this process."""
        states = (Path(self.project_dir) / "checkpoints").glob("checkpoint_*")
        found = [re.fullmatch(r"checkpoint_(\d+)", each.name) for each in states]
        theirs = self.project_configuration
        theirs.iteration = max([theirs.iteration, *(int(each[1]) + 1 for each in found if each is not None)])

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register objects with accelerate and ``elastic_ray.register_state``, so that joiners receive them.

        Raises:
            ValueError: An object lacks ``state_dict`` or ``load_state_dict``.
            RuntimeError: Training has already started, so joining workers would not have the object.
        """
        first = len(self._custom_objects)
        super().register_for_checkpointing(*objects)
        session = current_session()
        if session.synced and not session.elastic:
            return  # another training of this process: nobody joins it
        for number, each in enumerate(objects, first):
            er.register_state(f"accelerate/{number}", each)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load a saved state on every worker.

        Before the first epoch, the job resumes at the saved data position. Later, only the model, optimizer and other
        saved objects are restored, as in accelerate, and the job keeps its current position.
        """
        found: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: found.append(folder))
        try:
            with self._plain_models():
                super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()
        place = read_position(Path(found[0]))
        if place is not None and not current_session().synced:
            resume_at(current_session(), place)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Raise NotImplementedError; batches differ between runs, and ``load_state`` restores the position instead."""
        raise NotImplementedError(
            "skip_first_batches() is not supported under elastic-ray, because batch sizes change: load_state() before "
            "the first epoch continues after the last sample that was used, without it"
        )

    @contextlib.contextmanager
    def _plain_models(self) -> Iterator[None]:
        """Substitute the plain models inside the block, because accelerate must save and load those."""
        prepared = self._models
        self._models = [plain_model(each) for each in prepared]
        try:
            yield
        finally:
            self._models = prepared

    def split_between_processes(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, because the number of processes changes during the job."""
        raise NotImplementedError(
            "split_between_processes() is not supported under elastic-ray, because the number of processes changes: "
            "prepare a DataLoader with shuffle=False, whose samples all workers share"
        )


def _steps(optimizer: Any, module: torch.nn.Module) -> bool:
    """True if the optimizer updates any parameter of the model."""
    own = {id(p) for p in module.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _stepped_by(scheduler: Any) -> Any:
    """Return a scheduler's plain optimizer, even if the scheduler was made for a prepared optimizer."""
    optimizer = getattr(scheduler, "optimizer", None)
    return getattr(optimizer, "optimizer", optimizer)
