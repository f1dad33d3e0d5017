"""The protocols between a wrapped model, the way its gradients are synchronised, and its sharded tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from elastic_ray.state.group_dependent import GroupDependent
from elastic_ray.sync.choosing.explanation import StrategyTable
from elastic_ray.sync.spec import Strategy

if TYPE_CHECKING:
    import torch


class GradientSync(GroupDependent, Protocol):
    """Protocol of gradient synchronisation for one model.

    In a step: :meth:`before_forward`, backward passes (which an implementation sees through hooks of its own), then
    :meth:`before_update`, and, where the optimizer steps, :meth:`applied`. When ``backward()`` returns outside
    :meth:`no_sync`, ``.grad`` holds the mean over the step's samples; while models ``drift``, over this rank's alone.
    When all ranks have committed a step that trained, :meth:`after_step` is called on each.

    Between two groups: ``local`` may put a planned change off; before it all ranks call :meth:`before_change` in the
    group that they leave, which a loss of ranks leaves out; :meth:`capture` travels to ranks that are behind, into
    their :meth:`restore`; then :meth:`enter_group` is called on all. What differs from rank to rank (residuals of a
    compression, delayed gradients) has to be made equal, or given up, by then.

    A lost step: :meth:`remember` at its beginning, :meth:`roll_back` before it is drawn again.
    """

    @property
    def nonfinite_ranks(self) -> Sequence[int] | None:
        """Ranks whose gradients were NaN or infinite when this step reduced them; None where all were finite."""

    @property
    def is_open(self) -> bool:
        """True if accumulated gradients wait for the optimizer."""

    @property
    def strategy(self) -> Strategy:
        """The strategy in force, for people."""

    def explain_strategy(self) -> StrategyTable:
        """Return a table of how each parameter is synchronised; raises StrategyError if there is nothing to explain."""

    def before_forward(self) -> None:
        """Prepare a call of the model."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to this rank's gradients."""

    def end_lost_pass(self, give_zeros: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Reduce what other ranks reduce, after a backward pass has ended with an exception that is caught.

        Args:
            give_zeros: makes a backward pass over parameters that gives nothing.
        """

    def before_update(self) -> None:
        """Prepare the update that the optimizer was asked for."""

    def applied(self) -> None:
        """Record that the optimizer has applied the update."""

    def rebuild(self) -> None:
        """Rebuild the buckets for other trainable parameters."""

    def require_statistics(self, user: str) -> None:
        """Refuse strategies that give no gradient statistics; raises StrategyError, which names the user."""

    def remember(self) -> Any:
        """A step begins: what it takes to undo it."""

    def roll_back(self, remembered: Any) -> None:
        """Roll back the lost step."""

    def capture(self) -> Any:
        """State for joiners and checkpoints, as nested dicts, lists and tuples of tensors and plain values."""

    def restore(self, tree: Any) -> None:
        """Take over a captured state."""
