"""Where a loader's batches come from, by the kind of its dataset, and what its ranks must have in common."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch.utils.data import IterableDataset

from elastic_ray.batch.limits import BatchLimits
from elastic_ray.data.arguments import LoaderArguments
from elastic_ray.data.batches import BatchSource, BringsBatches, Fetching, MapBatches, StreamBatches
from elastic_ray.data.compared.items import item_facts, still_facts
from elastic_ray.data.order import EpochOrder, order_for
from elastic_ray.data.whole_batches import BatchSamplerOrder, WholeBatches


def make_source(given: LoaderArguments, *, seed: int, drop_last: bool) -> BatchSource:
    """Batches of a loader.

    Args:
        given: its arguments.
        seed: of its order.
        drop_last: whether a tail shorter than a batch is left out.

    Raises:
        ValueError: nothing would be left of an epoch.
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
        given.dataset,
        make_order,
        seed=seed,
        fetching=fetching,
        batch_size=given.batch_size,
        drop_last=drop_last,
    )


def order_of(given: LoaderArguments) -> EpochOrder:
    """The order of the dataset's samples, as it is now."""
    if given.batch_sampler is not None:
        return BatchSamplerOrder(given.batch_sampler, samples=len(given.dataset))
    return order_for(given.dataset, shuffle=given.shuffles, sampler=given.sampler)


class PlanFacts:
    """What all ranks must have in common to share out the samples of one loader.

    Args:
        given: the loader's arguments.
        source: where its batches come from.
        seed: of its order.
        drop_last: also as a sampler has it.
    """

    def __init__(self, given: LoaderArguments, source: BatchSource, *, seed: int, drop_last: bool) -> None:
        self._options = given.facts(drop_last=drop_last) | ({"seed": seed} if given.draws else {})
        self._source = source
        # Where ranks run the same code; later each may have notes of its own in its dataset, and a joiner has none.
        self._first = item_facts(given.dataset)

    def of(self, epoch: int, limits: BatchLimits) -> dict[str, Any]:
        """Facts about a pass, as plain values by name."""
        batch = dataclasses.asdict(limits)
        items = self._source.facts(epoch)
        return {
            "batch_size": batch.pop("init_batch_size"),
            **batch,
            **self._options,
            **still_facts(items, self._first),
        }
