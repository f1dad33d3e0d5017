"""Participants of a run: a model's gradients, in the moments of a step and of a change of group (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator
    from elastic_ray.consensus.intents import Announced
    from placement.cluster.jobs import FoundStrategy


class Participant:
    """Makes the gradients of one model the same on all ranks. What is not overridden does nothing.

    In a step: :meth:`before_forward`, backward passes (seen through hooks of one's own), then :meth:`before_update`,
    and, where the optimizer steps, :meth:`applied`. When ``backward()`` returns outside ``no_sync``, ``.grad`` holds
    the mean over the step's samples; while models ``drift``, over this rank's alone. When all ranks have committed a
    step that trained, :meth:`after_step` is called on each.

    Between two groups: ``local`` may put a planned change off; before it all ranks call :meth:`before_change` in the
    group that they leave, which a loss of ranks leaves out; :meth:`capture` travels to ranks that are behind, into
    their :meth:`restore`; then :meth:`enter_group` is called on all. What differs from rank to rank (residuals of a
    compression, delayed gradients) has to be made equal, or given up, by then.

    A lost step: :meth:`remember` at its beginning, :meth:`roll_back` before it is drawn again.

    The registry walks the models in the order in which the loop wraps them, the same on all ranks.
    """

    # -- a step --------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """The model is about to be called."""

    def before_update(self) -> None:
        """The optimizer was asked to step."""

    def applied(self) -> None:
        """The optimizer steps."""

    def prepare_average(self) -> None:
        """A round has ended, and the ranks are about to vote on it: start what :meth:`after_step` waits for."""

    def after_step(self, *, agree_on_scale: bool) -> None:
        """All ranks have committed a step that trained: average models, where it is time.

        Args:
            agree_on_scale: the scaler is that of a model which drifts, too, so that ranks may have updated it
                otherwise, while the gradients of this one are added up.
        """

    def measure_examples(self, every: int | None, *, wanted: bool) -> bool:
        """Measure the noise of a single gradient in the model's layers, or stop; True if the layers allow it.

        Args:
            every: steps from one measurement to the next; None for as often as it costs little.
        """
        return False

    def join(self, what: Announced) -> None:
        """Join the collectives that others have announced of the model, because this rank has no sample in the step."""

    def remember(self) -> Any:
        """A step begins: what it takes to undo it."""
        return None

    def roll_back(self, remembered: Any) -> None:
        """The step was lost."""

    # -- what it is asked ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if gradients wait for an update."""
        return False

    @property
    def local(self) -> bool:
        """True if accumulated gradients differ from rank to rank, so that a planned change should wait."""
        return False

    @property
    def drifts(self) -> bool:
        """True while replicas intentionally diverge, until they are averaged."""
        return False

    @property
    def period(self) -> int:
        """Steps from one average of the model to the next; 1 where its gradients are reduced."""
        return 1

    @property
    def gives_back(self) -> bool:
        """True if ranks that are late between two averages give steps to others."""
        return False

    @property
    def steps_to_average(self) -> int:
        """Steps up to the next average of the model."""
        return 1

    @property
    def settled(self) -> bool:
        """True if replicas are identical after the committed steps, and this rank holds everything to be saved."""
        return True

    @property
    def divided(self) -> bool:
        """True if optimizer state is divided among ranks; the same on all of them."""
        return False

    @property
    def tabled(self) -> bool:
        """True if the model has sharded tables, which only rank 0 saves."""
        return False

    @property
    def meets_in_passes(self) -> bool:
        """True if forward and backward passes wait for other ranks, besides reductions of gradients."""
        return False

    @property
    def gives_statistics(self) -> bool:
        """True if the gradient noise scale is measured."""
        return True

    @property
    def marker(self) -> int:
        """Marker of the last average that ended on this rank: larger is later, 0 before the first."""
        return 0

    @property
    def scaler(self) -> object | None:
        """AMP's ``GradScaler``; None without AMP, and where ranks never update it otherwise."""
        return None

    @property
    def strategy_name(self) -> str:
        """Name of the strategy in force."""
        return ""

    @property
    def strategy_key(self) -> str | None:
        """Key of strategies whose step times may be mixed; None while one is being chosen."""
        return ""

    @property
    def found_strategies(self) -> Mapping[str, FoundStrategy]:
        """Strategies that have won races, by the form of the group."""
        return {}

    def set_strategy(self, strategy: object) -> None:
        """Go on with another one from the next step on; raises ValueError or TypeError where it cannot be."""

    def set_topology(self, topology: str) -> None:
        """Go on by another way through the group; raises ValueError where it cannot be."""
        raise ValueError("the gradients of a sharded model have no topology")

    def fix_drift(self) -> int:
        """Fix what happens after the step that ranks agree on; returns a digest of it, equal on all ranks."""
        return 0

    # -- the group -----------------------------------------------------------------------------------------------------

    def collapse(self, *, gather: bool = True) -> None:
        """Make models one that differ from rank to rank.

        Args:
            gather: have rank 0 hold the whole state of optimizers.
        """

    def prepare_to_save(self) -> None:
        """Rank 0 is about to save: have it hold what only other ranks hold; all ranks call it."""

    def before_change(self, stays: Sequence[bool]) -> None:
        """All ranks are here, and the group is about to change: make what differs from rank to rank equal.

        Args:
            stays: whether each rank is in the next group as well; what only others hold is handed over.

        Raises CommunicationFailedError: the present group broke meanwhile.
        """

    def reconcile(self, communicator: Communicator, marker: int, *, holds: bool, counts: bool) -> None:
        """Make models one in a new group, before its ranks exchange state, among those that hold a trained one.

        Args:
            holds: whether this rank holds such a state.
            counts: whether it has that marker, and adds to the one model.
        """

    def enter_group(self) -> None:
        """A group was entered, and all ranks hold the same state."""

    def capture(self) -> Any:
        """State for joiners and checkpoints, as nested dicts, lists and tuples of tensors and plain values."""
        return {}

    def restore(self, tree: Any) -> None:
        """Restore a captured state."""
