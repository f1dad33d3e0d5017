"""Row gradients of one rank in a step, until they are sent to the owners (torch)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from elastic_ray.sync.sharded.row_updates import summed

_Piece = tuple[Tensor, Tensor]


class LocalGradients:
    """See the module's text. They mean what ``.grad`` of a parameter would.

    Each micro-step adds what its backward passes give until ``optimizer.step()`` is called in it, less what
    ``zero_grad()`` has cleared there; what comes after ``optimizer.step()`` belongs to another loss.

    Args:
        nothing: no ids and no gradients, [0] and [0, width].
    """

    def __init__(self, nothing: _Piece) -> None:
        self._nothing = nothing
        self._at: tuple[Any, int] = (None, 0)
        self._carried: list[_Piece] = []  # of micro-steps before
        self._present: list[_Piece] = []
        self._carried_sent = self._closed = False
        self.waits = False  # some of the present step that were not taken

    def begin(self, step: Any, micro: int) -> bool:
        """A gradient is about to be added; returns whether it is the first one of its step."""
        before, self._at = self._at, (step, micro)
        first = before[0] is not step or (step is None and self._closed)
        if first:
            self._carried, self._present = [], []
            self._carried_sent = self._closed = self.waits = False
        elif before[1] != micro:
            self.close()
            self._closed = False
        return first

    def add(self, ids: Tensor, gradient: Tensor) -> None:
        """Another piece, weighted by samples; each id once."""
        if not self._closed:
            self._present.append((ids, gradient))
            self.waits = True

    def close(self) -> None:
        """The optimizer was asked to step."""
        if not self._closed:
            self._carried += self._present
            self._present = []
        self._closed = True

    def zero(self) -> None:
        """What the present micro-step has added is cleared."""
        self._present = []
        self._carried_sent = self.waits = False

    def take(self) -> _Piece:
        """What has not been sent yet, each id once; it counts as sent."""
        pieces = self._present if self._carried_sent else [*self._carried, *self._present]
        self._carried_sent, self.waits = True, False
        self._present = []
        return summed(pieces, self._nothing[1].shape[1]) if pieces else self._nothing
