"""Residual that a compression has left out of one bucket's gradients on this rank, changed in two phases (torch)."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Owed:
    """A gradient that is still to be sent.

    Attributes:
        flat: it, as one vector; None for nothing.
        scale: AMP's loss scale that is in it.
    """

    flat: torch.Tensor | None
    scale: float


class Residual:
    """Residual of one bucket: what is owed, what the pass in progress leaves, and what ranks owe together.

    A pass adds what is owed to its gradients and then owes what it has left out itself. Several passes of one step
    follow each other. None of that counts before :meth:`commit`, and :meth:`void` goes back to the last one.

    Before a change of group :meth:`fold` is given the sum over all ranks, which is then kept beside this rank's own
    until a pass of the next group begins: a change that fails half-way can still continue from either.

    Attributes:
        folded: that sum, without a loss scale; None where there is none.
    """

    def __init__(self) -> None:
        self._kept: Owed | None = None
        self._latest: Owed | None = None  # of an earlier pass of this step
        self._fresh: Owed | None = None  # of the last pass
        self._spare: torch.Tensor | None = None
        self.folded: torch.Tensor | None = None

    @property
    def owed(self) -> Owed | None:
        """Residual after the last committed step; None if nothing is owed."""
        return self._kept

    @property
    def in_use(self) -> bool:
        """True if a pass has a residual to add."""
        return self._kept is not None or self.folded is not None

    def add_to(self, flat: torch.Tensor, scale: float) -> None:
        """Add the residual to the vector of a pass that begins."""
        owed = self._begin_pass()
        if owed is not None and owed.flat is not None:
            flat.add_(owed.flat, alpha=scale / owed.scale)

    def take(self, scale: float) -> torch.Tensor | None:
        """Return the residual times ``scale`` for a pass whose gradients are no vector; None if nothing is owed."""
        owed = self._begin_pass()
        return None if owed is None or owed.flat is None else owed.flat * (scale / owed.scale)

    def _begin_pass(self) -> Owed | None:
        self.folded = None
        self._latest, self._fresh = self._fresh or self._latest, None
        return self._latest or self._kept

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for what a pass leaves out; its content is of no meaning."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and spare.shape == like.shape else torch.empty_like(like)

    def leave(self, flat: torch.Tensor | None, scale: float) -> None:
        """Leave the residual of the pass; None for nothing."""
        self._fresh = Owed(flat, scale)

    def drop(self) -> None:
        """Drop the pass."""
        self._fresh = None

    def commit(self) -> None:
        """Commit the step."""
        new = self._fresh or self._latest
        if new is not None:
            self._spare = self._kept.flat if self._kept is not None else None
            self._kept = new if new.flat is not None else None
        self._latest = self._fresh = None

    def void(self) -> None:
        """Discard the pass: the residual stays as it was before."""
        self._latest = self._fresh = None

    def fold(self, total: torch.Tensor) -> None:
        """Store the sum of all ranks' residuals, without a loss scale, before the ranks leave the group."""
        self.folded = total

    def share(self, ranks: int) -> None:
        """Share the known sum equally among the ranks of a new group."""
        total = self.folded
        if total is not None:
            self.become(total / ranks)
            self.folded = total

    def become(self, flat: torch.Tensor | None) -> None:
        """Replace the residual by `flat`, without a loss scale."""
        self._latest = self._fresh = self._spare = self.folded = None
        self._kept = None if flat is None else Owed(flat, 1.0)
