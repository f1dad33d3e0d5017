"""Training data loaders of a Trainer, shared by all workers."""

from __future__ import annotations

import dis
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

import elastic_ray as er
from elastic_ray.integrations.batch_options import BatchOptions
from elastic_ray.integrations.huggingface.arguments import accumulated
from elastic_ray.loop.api import current_session, get_context

logger = logging.getLogger(__name__)


def train_loader(trainer: Any) -> er.AdaptiveDataLoader:
    """Return a loader that divides the trainer's training data between all workers."""
    dataset, args = trainer.train_dataset, trainer.args
    if dataset is None:
        raise ValueError("Trainer: training requires a train_dataset")
    options: dict[str, Any] = {}
    if hasattr(dataset, "column_names") and not isinstance(dataset, IterableDataset):
        dataset = trainer._remove_unused_columns(dataset, description="training")
        options["collate_fn"] = trainer.data_collator
    else:
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")
        options["collate_fn"] = collate
    if not isinstance(dataset, IterableDataset):
        options |= _order_and_workers(trainer, dataset)
    elif args.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers={args.dataloader_num_workers} is not supported under elastic-ray for a dataset "
            "without a length: each worker reads the stream in its own process and keeps its share. Leave it out, or "
            "pass a dataset with a length"
        )
    loader = er.AdaptiveDataLoader(
        dataset,
        batch_size=trainer._train_batch_size * accumulated(args),
        seed=args.data_seed if args.data_seed is not None else args.seed,
        drop_last=args.dataloader_drop_last,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        **options,
    )
    if get_context().get_world_rank() == 0:
        logger.info(
            "batches of %d samples (per_device_train_batch_size x gradient_accumulation_steps) are shared by all "
            "workers, however many there are",
            loader.batch_size,
        )
    return loader


def shared_loader(loader: Any, batch_options: BatchOptions) -> er.AdaptiveDataLoader:
    """Return the trainer's training loader, which users may override, with its batches divided between all workers."""
    ours = isinstance(loader, er.AdaptiveDataLoader)
    shared: er.AdaptiveDataLoader = loader if ours else batch_options.shared(_of_torch(loader))
    shared.join(current_session())
    batch_options.apply(shared)
    return shared


def _of_torch(loader: Any) -> DataLoader[Any]:
    """Return the loader if it is a plain torch ``DataLoader``; raise TypeError otherwise."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"get_train_dataloader() must give an elastic_ray.AdaptiveDataLoader or a torch DataLoader, but gave a "
            f"{type(loader).__name__}"
        )
    if type(loader) is not DataLoader:  # accelerate's, which would give each process its share of the batches
        raise TypeError(
            f"get_train_dataloader() gave a {type(loader).__name__}: leave out accelerator.prepare(), and return the "
            "DataLoader itself"
        )
    return loader


def counts_items(compute_loss: Callable[..., Any]) -> bool:
    """True if the bytecode of ``compute_loss`` uses ``num_items_in_batch``, directly or by passing on ``**kwargs``.

    The loss is then a sum over items divided by that number; otherwise it is a mean over samples.
    """
    code = inspect.unwrap(compute_loss).__code__
    used = {each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD")}
    passes_on = bool(code.co_flags & inspect.CO_VARKEYWORDS) and code.co_varnames[_arguments(code)] in used
    return "num_items_in_batch" in used or passes_on


def _arguments(code: types.CodeType) -> int:
    """Return the index of ``**kwargs`` in a function's variable names."""
    return code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)


def _order_and_workers(trainer: Any, dataset: Any) -> dict[str, Any]:
    """Return the loader arguments for sample order and worker processes, for a dataset with a length."""
    args = trainer.args
    options: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers,
    }
    if args.dataloader_num_workers:
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = getattr(args, "dataloader_multiprocessing_context", None)
    sampler = trainer._get_train_sampler(dataset)
    if sampler is None or isinstance(sampler, SequentialSampler):
        options["shuffle"] = False
    elif not isinstance(sampler, RandomSampler):  # a random one is the loader's own order
        options["sampler"] = sampler
    return options
