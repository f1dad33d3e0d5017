"""Detection of loops that draw a batch before they train on the one before (pure)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

DRAWN_AHEAD = (
    "the loop trains on a batch after it has drawn a later one from an AdaptiveDataLoader, as prefetchers and "
    "list(islice(loader, n)) do. A step's samples are those of the batch drawn last: if the step is lost, the earlier "
    "batch would be lost with it, and gradients are weighted by the later batch. Train on each batch before the next "
    "is drawn (for batch in loader): num_workers loads ahead, and backward() adds up gradients over several batches"
)


class DrawnBatches:
    """First batch of an outermost pass, held weakly until a step of the pass trains."""

    def __init__(self) -> None:
        self.start_pass()

    def start_pass(self) -> None:
        """Drop what is known of an earlier pass."""
        self.looks = True  # no step of the pass has trained yet
        self.waits = False  # the first step has ended without training, and none has trained since
        self.ahead = False  # the same, but later steps have trained
        self._first: list[weakref.ref[Any]] = []
        self._present: list[weakref.ref[Any]] = []

    def draw(self, batch: Any) -> None:
        """Record a (micro-)batch that is handed out; the first step's batches are those from before :attr:`waits`."""
        found = [weakref.ref(each) for each in _tensors(batch)]
        if self.waits:
            self._present = found
        else:
            self._first += found

    def end_step(self, *, trained: bool) -> None:
        """Record that a step was committed."""
        self.looks, self.ahead = not trained, self.waits and trained
        self.waits = not trained

    def check(self, given: Any, *, alone: bool) -> None:
        """Raise RuntimeError if ``given``, a model's arguments, are of the first batch, although its step is over.

        A rank that remains ``alone`` loses no step.
        """
        if alone:
            return
        present = {id(each()) for each in self._present}
        first = {id(each()) for each in self._first if each() is not None} - present
        if any(id(each) in first or (each._base is not None and id(each._base) in first) for each in _tensors(given)):
            raise RuntimeError(DRAWN_AHEAD)


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "_base"):
        yield value
