"""``accelerate.Accelerator`` for train loops of your own, as elastic jobs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

import elastic_ray as er
from elastic_ray.integrations.overridden import check_overridden
from elastic_ray.loop.api import current_session, get_context

check_overridden(
    "accelerate",
    "huggingface",
    {
        accelerate.Accelerator: [
            *("prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler", "gather", "gather_for_metrics"),
            *("reduce", "pad_across_processes", "no_sync", "accumulate", "unwrap_model", "get_state_dict", "save"),
            *("save_state", "load_state", "wait_for_everyone", "check_trigger", "set_trigger", "main_process_first"),
        ],
    },
)

_POSITION_FILE = "elastic_ray_position.json"


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` within a train function; epochs come from ``elastic_ray.remaining_epochs_until(n)``.

    ``prepare`` takes each model together with its optimizer and the schedulers of that. The ``batch_size`` of a loader
    is that of all workers together, whose number changes. ``gather``, ``gather_for_metrics``, ``reduce`` and the others
    go through elastic-ray's collectives: tensors and plain values, never pickled.

    Args:
        max_batch_size: largest global batch [samples], as ``AdaptiveDataLoader.autoscale_batch_size`` takes it; the
            batch stays without.
        local_bsz_bounds: least and largest samples that one worker takes at once.
        gradient_accumulation: allow several micro-batches a step.
        elastic_options: of ``AdaptiveDataParallel`` (``strategy``, ``policy``, ``scaling_rule``, ...).
        options: of ``accelerate.Accelerator``.

    Raises:
        ValueError: an argument that cannot be kept when workers come and go.
    """

    flag_tensor: Any

    def __init__(
        self,
        *,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
        elastic_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if max_batch_size is None and (local_bsz_bounds is not None or gradient_accumulation):
            raise ValueError("local_bsz_bounds and gradient_accumulation belong to max_batch_size, which is None")
        for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin"):
            if options.get(name) is not None:
                raise ValueError(f"{name} cannot be kept under elastic-ray: its state cannot follow the group")
        if (
            options.get("gradient_accumulation_steps", 1) != 1
            or options.get("gradient_accumulation_plugin") is not None
        ):
            raise ValueError(
                "gradient_accumulation_steps cannot be kept under elastic-ray: the job cuts micro-batches by itself: "
                "pass a larger batch_size, and Accelerator(max_batch_size=, gradient_accumulation=True)"
            )
        super().__init__(**options)
        if self.state.num_processes > 1:
            raise ValueError(
                "torchrun or accelerate launch has set up processes of its own here: the job starts workers, each of "
                "them a process of its own"
            )
        self._autoscale: dict[str, Any] | None = None
        if max_batch_size is not None:
            self._autoscale = {
                "max_batch_size": max_batch_size,
                "local_bsz_bounds": local_bsz_bounds,
                "gradient_accumulation": gradient_accumulation,
            }
        self._elastic_options = elastic_options or {}

    @property
    def num_processes(self) -> int:
        """Workers of the present group."""
        return get_context().get_world_size()

    @property
    def process_index(self) -> int:
        """This worker's rank."""
        return get_context().get_world_rank()

    @property
    def local_process_index(self) -> int:
        """Its rank among those on its node."""
        return get_context().get_local_rank()

    @property
    def is_main_process(self) -> bool:
        """Whether it is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether it is the first on its node."""
        return self.local_process_index == 0

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """The same objects for an elastic job, in the same order.

        Raises:
            ValueError: a model without its optimizer, or an optimizer without its model.
        """
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        schedulers = [each for each in args if _is_scheduler(each)]
        ready: dict[int, Any] = {}
        for model in models:
            optimizer = _optimizer_of(model, optimizers)
            followers = [each for each in schedulers if getattr(each, "optimizer", None) is optimizer]
            prepared = self.prepare_model(model)
            ready[id(model)] = er.AdaptiveDataParallel(
                prepared, optimizer, lr_scheduler=followers, grad_scaler=self.scaler, **self._elastic_options
            )
            ready[id(optimizer)] = self.prepare_optimizer(optimizer)
        for optimizer in optimizers:
            if id(optimizer) not in ready:
                raise ValueError("prepare() takes an optimizer together with its model: prepare(model, optimizer, ...)")
        for scheduler in schedulers:
            ready[id(scheduler)] = self.prepare_scheduler(scheduler)
        for each in args:
            if isinstance(each, (DataLoader, er.AdaptiveDataLoader)):
                ready[id(each)] = self.prepare_data_loader(each)
        result = tuple(ready.get(id(each), each) for each in args)
        return result if len(result) > 1 else result[0]

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> PreparedLoader:
        """A loader whose batches all workers share."""
        loader = data_loader if isinstance(data_loader, er.AdaptiveDataLoader) else er.AdaptiveDataLoader(data_loader)
        if self._autoscale is not None:
            loader.autoscale_batch_size(**self._autoscale)
            self._autoscale = None
        return PreparedLoader(loader, self.device, self._begin_micro_step)

    def _begin_micro_step(self, *, goes_on: bool) -> None:
        """A micro-batch is handed out; ``goes_on``: of a step whose gradients so far are kept already."""
        self.gradient_state._set_sync_gradients(not current_session().ledger.accumulating)
        if goes_on:
            for each in self._optimizers:
                each.optimizer.zero_grad()

    def gather(self, tensor: Any) -> Any:
        """Tensors of all workers, one behind the other; their first sizes may differ."""
        return _joined(er.all_gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As :meth:`gather`, since no sample is there twice; lists of other values are put together."""
        if use_gather_object or (isinstance(input_data, list) and not _all_tensors(input_data)):
            return [each for part in er.all_gather(list(input_data)) for each in part]
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """Sum or mean over all workers of each tensor in it."""
        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f"reduction must be 'sum', 'mean' or 'none', but got {reduction!r}")
        if reduction == "none":
            return tensor
        return _mapped(tensor, lambda each: er.all_reduce(each, reduction) * scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Each tensor as long on ``dim`` as the longest of any worker's."""

        def padded(each: torch.Tensor) -> torch.Tensor:
            if dim >= each.dim():
                return each
            missing = int(er.all_reduce(each.shape[dim], "max")) - each.shape[dim]
            shape = [*each.shape[:dim], missing, *each.shape[dim + 1 :]]
            parts = [each, each.new_full(shape, pad_index)]
            return torch.cat(parts[::-1] if pad_first else parts, dim)

        return _mapped(tensor, padded)

    def wait_for_everyone(self) -> None:
        """As ``elastic_ray.barrier``."""
        er.barrier()

    def check_trigger(self) -> bool:
        """Whether any worker has called ``set_trigger``."""
        own = float(self.flag_tensor.item()) if self.flag_tensor is not None else 0.0
        if er.all_reduce(own, "max") == 0:
            return False
        self.flag_tensor = None
        return True

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block before the others."""
        if not self.is_main_process:
            er.barrier()
        main = self.is_main_process
        yield
        if main:
            er.barrier()

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients of the block stay on this worker."""
        with model.no_sync():
            yield

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Nothing: the job cuts micro-batches, and :attr:`sync_gradients` tells which of them ends a step."""
        yield

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain model."""
        return super().unwrap_model(_plain(model), *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Of the plain model."""
        return super().get_state_dict(_plain(model), unwrap)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On the first worker of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """On rank 0."""
        if self.is_main_process:
            super().save(obj, f, safe_serialization)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """On rank 0, with the place in the data."""
        if not self.is_main_process:
            return output_dir
        folder = super().save_state(output_dir, *args, **kwargs)
        place = current_session().resume_point().to_json()
        (Path(folder) / _POSITION_FILE).write_text(json.dumps(place))
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Before the first epoch, on every worker; the job begins where the state was saved."""
        super().load_state(input_dir, *args, **kwargs)
        place = Path(input_dir or "") / _POSITION_FILE
        if place.exists():
            er.AdaptiveDataLoader.load_state_dict(_Anywhere(), json.loads(place.read_text()))

    def split_between_processes(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: shares change with the group."""
        raise NotImplementedError(
            "split_between_processes() is not there under elastic-ray, for the number of processes changes: prepare a "
            "DataLoader with shuffle=False, whose samples all workers share"
        )


class PreparedLoader:
    """An ``AdaptiveDataLoader`` whose batches come on the worker's device.

    Args:
        loader: gives the batches; whatever it has is to be had here.
        device: the worker's.
        begin: is called with each batch, ``goes_on=True`` within a step.
    """

    def __init__(self, loader: er.AdaptiveDataLoader, device: torch.device, begin: Callable[..., None]) -> None:
        self.loader = loader
        self._device = device
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            step = current_session().passes.step
            self._begin(goes_on=step is not None and step.micro > 0)
            yield send_to_device(batch, self._device)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)


class _Anywhere(er.AdaptiveDataLoader):
    """Stands for any loader of the run, whose places are the same."""

    def __init__(self) -> None:
        self._session = current_session()


def _plain(model: Any) -> Any:
    return model.module if isinstance(model, er.AdaptiveDataParallel) else model


def _is_scheduler(each: Any) -> bool:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    return isinstance(each, (torch.optim.lr_scheduler.LRScheduler, plateau))


def _optimizer_of(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The one that steps the model; raises ValueError."""
    own = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    raise ValueError(
        f"prepare() takes a model together with its optimizer, but there is none for this {type(model).__name__}; a "
        "model that is only evaluated needs no prepare(), model.to(accelerator.device) is enough"
    )


def _all_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return all(map(_all_tensors, tree.values()))
    if isinstance(tree, (list, tuple)):
        return all(map(_all_tensors, tree))
    return isinstance(tree, torch.Tensor)


def _mapped(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure of changed tensors."""
    if isinstance(tree, Mapping):
        return type(tree)({key: _mapped(each, change) for key, each in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, (list, tuple)):
        return type(tree)([_mapped(each, change) for each in tree])
    return change(tree) if isinstance(tree, torch.Tensor) else tree


def _joined(parts: list[Any]) -> Any:
    """Equal structures of all ranks as one, tensors put one behind the other."""
    first = parts[0]
    if isinstance(first, Mapping):
        return type(first)({key: _joined([part[key] for part in parts]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        return type(first)([_joined(list(each)) for each in zip(*parts, strict=True)])
    if isinstance(first, torch.Tensor):
        return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in parts])
    return parts
