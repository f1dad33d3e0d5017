"""Batch fetcher that feeds an ``AdaptiveDataLoader`` to Lightning's training loop and detects the ends of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataFetcher

import elastic_ray as er
from elastic_ray.loop.api import current_session

_NOTHING = object()


class UnreadStream:
    """Stand-in for a loader over a dataset without a length that keeps Lightning's setup from reading the stream."""

    def __init__(self, loader: er.AdaptiveDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the loader that this object replaces."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state dict into the loader that this object replaces."""
        self.loader.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class ElasticFetcher(_DataFetcher):
    """Fetcher of an ``AdaptiveDataLoader``'s batches for Lightning's training loop."""

    def __init__(
        self, loader: er.AdaptiveDataLoader, most: int | None, on_batch: Callable[[ElasticFetcher], None]
    ) -> None:
        super().__init__()
        self._on_batch, self.loader, self.most = on_batch, loader, most
        self._batches: Iterator[Any] | None = None
        self._next: Any = _NOTHING

    def __iter__(self) -> ElasticFetcher:
        self._batches, self._next = None, _NOTHING  # the pass is entered when the first batch is asked for
        self.fetched, self.done = 0, False
        return self

    def reset(self) -> None:
        """Reset the count of fetched batches for a new pass over the data."""
        self.fetched, self.done = 0, False

    @property
    def exhausted(self) -> bool:
        """True if the pass has no more batches; reading this property fetches the next batch.

        Fetching commits the previous step, or rolls it back (with everything the loop counted during it) and draws its
        batch again.
        """
        if self._next is _NOTHING:
            if self._batches is None:
                self._batches = self.loader.batches(joined_later=True)
            self._next = next(self._batches, _NOTHING)
        return self._next is _NOTHING

    def __next__(self) -> tuple[Any, int, int]:
        self._start_profiler()
        try:
            if self.exhausted:
                self.done = True
                raise StopIteration
        finally:
            self._stop_profiler()
        batch, self._next = self._next, _NOTHING
        index, self.fetched = self.fetched, self.fetched + 1
        self.done = self.loader.on_last_batch or self.at_limit
        self._on_batch(self)
        return batch, index, 0

    @property
    def at_limit(self) -> bool:
        """True if the epoch's batch limit has been reached and no step is in progress; False without a limit."""
        return self.most is not None and self.fetched >= self.most and not current_session().ledger.accumulating

    @property
    def left_early(self) -> bool:
        """True if the pass was ended before its last batch and before the batch limit."""
        passes, size = current_session().progress.passes, self.loader.current_batch_size
        steps = sized_len(self.loader)
        if not passes or not passes[-1].done or self.at_limit or steps is None:
            return False
        return steps * size - passes[-1].position >= size

    def leave(self) -> bool:
        """End the pass after the current step; return False if that step was lost and must be drawn again."""
        if current_session().ledger.step is not None:
            current_session().passes.end_after_step()
        self.done = self.exhausted
        return self.done

    def finish(self) -> None:
        """Mark the pass as done, because the loader has no more batches."""
        self.done = True

    def batches_of_epoch(self, had: int) -> float:
        """Return the epoch's number of micro-batches if ``had`` have been started; infinite if unknown."""
        left = self.loader.batches_left
        if left is None:
            return float("inf")
        return min(had + left, self.most) if self.most is not None else had + left
