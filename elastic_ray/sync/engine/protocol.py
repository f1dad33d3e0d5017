"""The protocols between a wrapped model, the way its gradients are synchronised, and its sharded tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from elastic_ray.state.group_dependent import GroupDependent
from elastic_ray.sync.choosing.explanation import StrategyTable
from elastic_ray.sync.plan import SyncPlan
from elastic_ray.sync.profile import ModelProfile
from elastic_ray.sync.sliced_gradients.routes import OwnedSpan
from elastic_ray.sync.spec import Strategy


class GradientSync(GroupDependent, Protocol):
    """How the gradients of one model become the same on all ranks.

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
        """Whether gradients wait for the optimizer."""

    @property
    def strategy(self) -> Strategy:
        """The strategy in force, for people."""

    def explain_strategy(self) -> StrategyTable:
        """What it does with which parameters; raises StrategyError where there is nothing to say."""

    def drop_halves(self) -> None:
        """A step begins: what the first half of the one before has left is of no use any more."""

    def before_forward(self) -> None:
        """The model is about to be called."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to this rank's gradients."""

    def before_update(self) -> None:
        """The optimizer was asked to step."""

    def applied(self) -> None:
        """It steps."""

    def rebuild(self) -> None:
        """Other parameters are trainable than before."""

    def require_statistics(self, user: str) -> None:
        """Refuse strategies that give no gradient statistics; raises StrategyError, which names the user."""

    def remember(self) -> Any:
        """A step begins: what it takes to undo it."""

    def roll_back(self, remembered: Any) -> None:
        """The step was lost."""

    def capture(self) -> Any:
        """State for joiners and checkpoints, as nested dicts, lists and tuples of tensors and plain values."""

    def restore(self, tree: Any) -> None:
        """Take over a captured state."""


class DividedState(Protocol):
    """A model's optimizer state, as far as a strategy divides it among the ranks.

    Methods that communicate raise CommunicationFailedError where the group breaks.
    """

    def follow(self, plan: SyncPlan, profile: ModelProfile) -> None:
        """Buckets were laid out for another strategy, other parameters or another group."""

    @property
    def owners(self) -> object:
        """The ranks that own each part; another object where they are others than before."""

    def owned_spans(self, params: Sequence[torch.nn.Parameter]) -> list[list[OwnedSpan]]:
        """The parts of each parameter."""

    @property
    def unsettled(self) -> bool:
        """Whether the state is not divided as the plan wants it."""

    def settle_between_steps(self) -> None:
        """Divide it so; all ranks call it before a step."""

    def enter_group(self) -> None:
        """A group was entered, and all ranks hold the same state."""

    def hand_over(self, stays: Sequence[bool]) -> None:
        """Ranks of the present group are about to leave, all but those that stay."""

    @property
    def divided(self) -> bool:
        """Whether it lies with several ranks; the same on all."""

    @property
    def settled(self) -> bool:
        """Whether this rank can save the whole state."""

    def gather(self) -> None:
        """Have rank 0 hold the whole state until the next update."""
