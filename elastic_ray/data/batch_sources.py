"""Selection of a loader's batch source from the loader's arguments (torch)."""

from __future__ import annotations

import functools

from torch.utils.data import IterableDataset

from elastic_ray.data.arguments import LoaderArguments
from elastic_ray.data.batches import (
    BatchSamplerOrder,
    BatchSource,
    BringsBatches,
    Fetching,
    MapBatches,
    StreamBatches,
    WholeBatches,
)
from elastic_ray.data.order import EpochOrder, order_for


def make_source(given: LoaderArguments, *, seed: int, drop_last: bool) -> BatchSource:
    """Return the source of one rank's batches that suits a loader's dataset and arguments.

    Raises ValueError if dropping the last batch would leave no batch in an epoch.
    """
    if isinstance(given.dataset, BringsBatches):
        return given.dataset.batch_source(given.options.get("collate_fn"))
    if isinstance(given.dataset, IterableDataset):
        return StreamBatches(given.dataset, seed=seed, collate=given.options.get("collate_fn"))
    fetching = Fetching(
        num_workers=given.num_workers,
        persistent_workers=given.persistent_workers,
        on_epoch=given.on_epoch,
        options=given.options,
    )
    make_order = functools.partial(order_of, given)
    make_order()  # here, for its errors
    if given.batch_sampler is None and drop_last and given.batch_size > len(given.dataset):
        raise ValueError(
            f"with drop_last=True batch_size must be at most the {len(given.dataset)} samples of an epoch, else "
            f"nothing is left, but got {given.batch_size}"
        )
    if not given.whole_batches:
        return MapBatches(given.dataset, make_order, seed=seed, fetching=fetching)
    return WholeBatches(
        given.dataset, make_order, seed=seed, fetching=fetching, batch_size=given.batch_size, drop_last=drop_last
    )


def order_of(given: LoaderArguments) -> EpochOrder:
    """Return the sample order implied by the loader's arguments, for the dataset's current length."""
    if given.batch_sampler is not None:
        return BatchSamplerOrder(given.batch_sampler, samples=len(given.dataset))
    return order_for(given.dataset, shuffle=given.shuffles, sampler=given.sampler)
