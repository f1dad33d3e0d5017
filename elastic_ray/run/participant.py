"""Participants in a run: hooks that let a model's gradients react to steps and group changes (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ray.consensus.intents import Announced
    from elastic_ray.sync.averaging.drift import Drift
    from placement.cluster.jobs import FoundStrategy


class Participant:
    """Base class of objects that keep one model's gradients identical on all ranks; methods do nothing by default.

    In a step: :meth:`before_forward`, backward passes (observed through the participant's own hooks), then
    :meth:`before_update`, and :meth:`applied` if the optimizer steps. When ``backward()`` returns outside ``no_sync``,
    ``.grad`` holds the mean over the step's samples; while replicas ``drift``, the mean over this rank's samples. When
    all ranks have committed a step that trained, :meth:`after_step` is called on each.

    Between two groups: ``local`` may postpone a planned change. Before the change, all ranks call :meth:`before_change`
    in the group that they are leaving, unless ranks were lost. Ranks that lack the current state receive the state from
    :meth:`capture` and :meth:`restore` it. Then :meth:`enter_group` is called on all ranks. By then, anything that
    differs from rank to rank (residuals of a compression, delayed gradients) must have been made equal or dropped.

    In a lost step: :meth:`remember` at its start, :meth:`roll_back` before its batch is drawn again.

    The registry visits the models in the order that the loop wraps them, which is the same on all ranks.
    """

    averages = False  # whether replicas are averaged, so that :meth:`scale_moments` is called
    drift: Drift | None = None  # schedule of the averages of its replicas; None where they never diverge

    # -- a step --------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Prepare for a forward pass, right before the model is called."""

    def before_update(self) -> None:
        """Prepare for an optimizer step after user code has called the optimizer."""

    def applied(self) -> None:
        """Record that the optimizer is about to apply its update in this step."""

    def scale_moments(self, optimizer: Any) -> None:
        """Correct an optimizer's second moments for the full batch, after a step with this rank's gradient."""

    def prepare_average(self, *, ends_pass: bool) -> None:
        """Start the work for which :meth:`after_step` waits, before the ranks vote on a round of local steps.

        Args:
            ends_pass: Whether the pass ends with the round, so that replicas are merged right after it.
        """

    def after_step(self, *, agree_on_scale: bool) -> None:
        """Average the replicas if due, after all ranks have committed a step that trained.

        Args:
            agree_on_scale: True to make the loss scale equal on all ranks, because ranks may have updated the
                ``GradScaler`` differently: it is shared with a model whose replicas drift.
        """

    def measure_examples(self, every: int | None, *, wanted: bool) -> bool:
        """Start (if ``wanted``) or stop measuring per-example gradient noise in layers; return True if it is measured.

        Args:
            every: Number of steps from one measurement to the next; None measures as often as is cheap.
        """
        return False

    def join(self, what: Announced) -> None:
        """Join the action ``what`` that other ranks have announced, because this rank has no samples in the step."""

    def remember(self) -> Any:
        """Return the values needed to undo the step that is about to start, for :meth:`roll_back`."""
        return None

    def roll_back(self, remembered: Any) -> None:
        """Undo a lost step, given ``remembered``, the value that :meth:`remember` returned at its start."""

    # -- what it is asked ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if accumulated gradients exist that no optimizer step has applied yet."""
        return False

    @property
    def local(self) -> bool:
        """True if accumulated gradients differ between ranks, so that a planned group change should wait."""
        return False

    @property
    def drifts(self) -> bool:
        """True while replicas intentionally diverge (drift), until their models are averaged."""
        return False

    @property
    def may_train(self) -> bool:
        """True if a step that starts now may train the model."""
        return False

    @property
    def settled(self) -> bool:
        """True if replicas are identical after the committed steps, and this rank holds all state to be saved."""
        return True

    @property
    def divided(self) -> bool:
        """True if optimizer state is divided between ranks; the same on all ranks."""
        return False

    @property
    def tabled(self) -> bool:
        """True if the model has sharded tables (embeddings whose rows are divided), which only rank 0 saves."""
        return False

    @property
    def meets_in_passes(self) -> bool:
        """True if forward and backward passes wait for other ranks in collectives other than gradient reductions."""
        return False

    @property
    def sends_in_pairs(self) -> bool:
        """True if ranks exchange parts of tensors in pairs."""
        return self.meets_in_passes

    @property
    def gives_statistics(self) -> bool:
        """True if the gradient noise scale is measured."""
        return True

    @property
    def strategy_name(self) -> str:
        """Name of the strategy that currently synchronises the model."""
        return ""

    @property
    def strategy_key(self) -> str | None:
        """Key for recording step times; times with equal keys are comparable. None during a race."""
        return ""

    @property
    def found_strategies(self) -> Mapping[str, FoundStrategy]:
        """Strategies that have won races, keyed by model number, backend, and distribution of ranks over nodes."""
        return {}

    def set_strategy(self, strategy: object) -> None:
        """Switch to a different strategy from the next step on; raises ValueError or TypeError if it cannot be used."""

    def keep_strategy(self) -> None:
        """Cancel a strategy switch that was requested since the last step."""

    def set_topology(self, topology: str) -> None:
        """Switch to a different reduction topology; raises ValueError if the model cannot use it."""
        raise ValueError("the gradients of a sharded model have no topology")

    def fix_drift(self) -> int:
        """Fix the strategy that applies after this step; return its digest, for ranks to compare."""
        return 0

    # -- the group -----------------------------------------------------------------------------------------------------

    @property
    def merge_layout(self) -> int:
        """Digest of the tensors that :meth:`collapse` merges."""
        return 0

    def collapse(self, *, gather: bool = True, alike: bool = False) -> None:
        """Merge diverged replicas into one model.

        Args:
            gather: True to also collect the entire optimizer state on rank 0.
            alike: True if all ranks are known to have the same :attr:`merge_layout`.
        """

    def prepare_to_save(self) -> None:
        """Collect on rank 0, before it saves, the state that only other ranks hold; called on every rank."""

    def before_change(self, stays: Sequence[bool]) -> None:
        """Equalise state that differs between ranks, before a planned change of group; called on every rank.

        Args:
            stays: ``stays[r]`` is True if rank r is in the next group too. State that only leavers hold is handed over.

        Raises CommunicationFailedError if the current group breaks during the call.
        """

    def enter_group(self) -> None:
        """Enter a new group, where all ranks hold the same state."""

    def capture(self) -> Any:
        """Return the state for joining ranks and checkpoints: nested containers of tensors and plain values."""
        return {}

    def restore(self, tree: Any) -> None:
        """Restore a state returned by :meth:`capture`."""
