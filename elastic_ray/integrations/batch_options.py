"""What a framework's user says of adaptive batches."""

from __future__ import annotations

import dataclasses
import logging

import elastic_ray as er
from elastic_ray.loop.api import get_context

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Arguments of ``AdaptiveDataLoader.autoscale_batch_size``.

    Attributes:
        max_batch_size: largest global batch [samples]; the batch stays where it is None.
        local_bsz_bounds: least and largest samples that one worker takes at once.
        gradient_accumulation: allow several micro-batches a step.

    Raises:
        ValueError: limits of a batch that has none.
    """

    max_batch_size: int | None = None
    local_bsz_bounds: tuple[int | None, int | None] | None = None
    gradient_accumulation: bool = False

    def __post_init__(self) -> None:
        if self.max_batch_size is None and (self.local_bsz_bounds is not None or self.gradient_accumulation):
            raise ValueError("local_bsz_bounds and gradient_accumulation belong to max_batch_size, which is None")

    def apply(self, loader: er.AdaptiveDataLoader) -> None:
        """Have a loader adapt its batch, if it is to be.

        Raises:
            RuntimeError, ValueError: as ``autoscale_batch_size``; ValueError if the loader was given another largest
                batch by itself.
        """
        if self.max_batch_size is None:
            return
        if loader.max_batch_size not in (None, self.max_batch_size):
            raise ValueError(
                f"max_batch_size={self.max_batch_size}, but the loader was told autoscale_batch_size"
                f"({loader.max_batch_size}): say it in one place"
            )
        loader.autoscale_batch_size(self.max_batch_size, self.local_bsz_bounds, self.gradient_accumulation)
        if get_context().get_world_rank() == 0:
            logger.info(
                "max_batch_size=%d is that of the loader over a %s, with batches of %s samples: other loaders keep "
                "their batch",
                self.max_batch_size,
                type(loader.dataset).__name__,
                loader.batch_size,
            )
