"""Adaptive batch options and metric reporting that the framework integrations share."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

import elastic_ray as er
from elastic_ray.data.arguments import LoaderArguments, copied_arguments
from elastic_ray.loop.api import current_session, get_context

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of ``AdaptiveDataLoader.autoscale_batch_size``, as set by a user of another training framework."""

    max_batch_size: int | None = None  # largest global batch [samples]; the batch stays where it is None
    # least and largest samples that one worker takes at once
    local_bsz_bounds: tuple[int | None, int | None] | None = None
    gradient_accumulation: bool = False  # allow several micro-batches a step
    # micro-batches a step as the framework's own argument says it: the loader's batch is so many times the user's, and
    # no worker takes more than the user's at once. The job may cut it in another way.
    accumulated: int = 1

    def __post_init__(self) -> None:
        if self.accumulated < 1:
            raise ValueError(f"gradient_accumulation_steps must be 1 or more, but got {self.accumulated}")
        if self.max_batch_size is None and (self.local_bsz_bounds is not None or self.gradient_accumulation):
            raise ValueError("local_bsz_bounds and gradient_accumulation need max_batch_size, which is None")

    def shared(self, given: DataLoader[Any] | er.AdaptiveDataLoader, *, seed: int = 0) -> er.AdaptiveDataLoader:
        """Return the user's loader as an ``AdaptiveDataLoader``, whose batches are divided among all workers."""
        if isinstance(given, er.AdaptiveDataLoader):
            if self.accumulated > 1:
                raise ValueError(
                    f"{self.accumulated} accumulated batches a step belong to a torch DataLoader, but this is an "
                    f"AdaptiveDataLoader, whose batch_size={given.batch_size} is that of all workers: "
                    "leave the accumulation out, and multiply batch_size"
                )
            return given
        size = given.batch_size * self.accumulated if given.batch_size else None
        return er.AdaptiveDataLoader(
            **copied_arguments(LoaderArguments(dataset=given), batch_size=size).keywords(), seed=seed
        )

    def apply(self, loader: er.AdaptiveDataLoader) -> None:
        """Call the loader's ``autoscale_batch_size`` with these options; do nothing if they leave its batch fixed."""
        most, bounds, size = self.max_batch_size, self.local_bsz_bounds, loader.batch_size
        if self.accumulated > 1 and size is not None:
            most, bounds = most or size, bounds or (None, max(1, size // self.accumulated))
        if most is None:
            return
        if loader.max_batch_size not in (None, most):
            raise ValueError(
                f"max_batch_size={most}, but the loader was told autoscale_batch_size"
                f"({loader.max_batch_size}): set it in one place"
            )
        loader.autoscale_batch_size(most, bounds, self.gradient_accumulation or self.accumulated > 1)
        if get_context().get_world_rank() == 0:
            logger.info(
                "max_batch_size=%d is that of the loader over a %s, with batches of %s samples: other loaders keep "
                "their batch",
                most,
                type(loader.dataset).__name__,
                loader.batch_size,
            )


class LoggedValues:
    """Reporter that adds the values logged by a framework to the job's metrics, dashboard, trackers and ``Result``.

    A report holds each name's last value, since evaluation and training log at different times. For a trial of a sweep,
    nothing is reported, because its reports are the scheduler's rounds, which the train function counts itself.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def report(self, values: Mapping[str, Any]) -> None:
        """Report the numbers in ``values``, and the last value logged for each other name; call on every rank."""
        session = current_session()
        for name, value in values.items():
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # text, or a tensor of several
                self._last[str(name)] = float(value)
        if session.elastic and session.synced and not session.controller.paced and self._last:
            er.report(self._last)
