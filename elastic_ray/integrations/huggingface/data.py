"""The data of a Trainer, for all workers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

import elastic_ray as er
from elastic_ray.loop.api import get_context

logger = logging.getLogger(__name__)


def train_loader(trainer: Any, batch_options: dict[str, Any]) -> er.AdaptiveDataLoader:
    """A loader of the trainer's training data, whose batches all workers share.

    Args:
        trainer: a ``transformers.Trainer``.
        batch_options: of ``autoscale_batch_size``; the batch stays where ``max_batch_size`` is None.

    Raises:
        ValueError: it has no training data.
    """
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
    loader = er.AdaptiveDataLoader(
        dataset,
        batch_size=trainer._train_batch_size,
        seed=args.data_seed if args.data_seed is not None else args.seed,
        drop_last=args.dataloader_drop_last,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        **options,
    )
    if batch_options["max_batch_size"] is not None:
        loader.autoscale_batch_size(**batch_options)
    if get_context().get_world_rank() == 0:
        logger.info(
            "batches of %d samples (per_device_train_batch_size) are shared by all workers, however many there are",
            trainer._train_batch_size,
        )
    return loader


def _order_and_workers(trainer: Any, dataset: Any) -> dict[str, Any]:
    """Arguments of a loader over a dataset with a length."""
    args = trainer.args
    options: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers,
    }
    if args.dataloader_num_workers:
        options["prefetch_factor"] = args.dataloader_prefetch_factor
    sampler = trainer._get_train_sampler(dataset)
    if sampler is None or isinstance(sampler, SequentialSampler):
        options["shuffle"] = False
    elif not isinstance(sampler, RandomSampler):  # a random one is the loader's own order
        options["sampler"] = sampler
    return options
