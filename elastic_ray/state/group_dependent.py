"""State of a model that depends on the group: gradients between two steps, and diverged replicas (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator
    from elastic_ray.consensus.intents import Announced


class GroupDependent(Protocol):
    """Protocol of one model's state between two optimizer steps, as far as a change of group concerns it."""

    @property
    def local(self) -> bool:
        """True if accumulated gradients differ from rank to rank, so that a planned change should wait."""

    @property
    def is_open(self) -> bool:
        """True if gradients wait for an update."""

    @property
    def drifts(self) -> bool:
        """True while replicas intentionally diverge, until they are averaged."""

    @property
    def settled(self) -> bool:
        """True if replicas are identical after the committed steps, and this rank holds everything to be saved."""

    @property
    def gives_statistics(self) -> bool:
        """True if the gradient noise scale is measured."""

    @property
    def divided(self) -> bool:
        """True if optimizer state is divided among ranks; the same on all of them."""

    @property
    def meets_in_passes(self) -> bool:
        """True if forward and backward passes wait for other ranks, besides reductions of gradients."""

    @property
    def tabled(self) -> bool:
        """True if the model has sharded tables, which only rank 0 saves."""

    def fix_drift(self) -> int:
        """Fix what happens after the step that ranks agree on; returns a digest of it, equal on all ranks."""

    @property
    def marker(self) -> int:
        """Marker of the last average that ended on this rank: larger is later, 0 before the first."""

    @property
    def scaler(self) -> object | None:
        """AMP's ``GradScaler``; None without AMP."""

    def after_step(self, *, agree_on_scale: bool) -> None:
        """Average the replicas if it is due, once all ranks have committed a training step.

        Args:
            agree_on_scale: the scaler is that of a model which drifts, too, so that ranks may have updated it
                otherwise, while the gradients of this one are added up.
        """

    def join(self, what: Announced) -> None:
        """Take part in what others have announced of the model, because this rank has no sample in the step."""

    def collapse(self, *, gather: bool = True) -> None:
        """Make models one that differ from rank to rank.

        Args:
            gather: have rank 0 hold the whole state of optimizers.
        """

    def prepare_to_save(self) -> None:
        """Rank 0 is about to save: have it hold what only other ranks hold; all ranks call it."""

    def reconcile(self, communicator: Communicator, marker: int, *, holds: bool, counts: bool) -> None:
        """Make diverged replicas identical in a new group, before its ranks exchange state.

        Args:
            marker: the latest of their markers.
            holds: whether this rank holds such a state.
            counts: whether it has that marker, and adds to the one model.
        """

    def before_change(self, stays: Sequence[bool]) -> None:
        """Make equal what differs between ranks, before the group changes; called on every rank.

        Args:
            stays: whether each rank is in the next group as well; what only others hold is handed over.

        Raises CommunicationFailedError: the present group broke meanwhile.
        """

    @property
    def strategy_name(self) -> str:
        """Name of the strategy in force."""

    def set_strategy(self, strategy: object) -> None:
        """Continue with another one from the next step on; raises ValueError or TypeError where it cannot be."""

    @property
    def strategy_key(self) -> str | None:
        """Tells strategies apart of which step times are not to be mixed; None while one is being chosen."""

    def enter_group(self) -> None:
        """Enter a group, whose ranks all hold the same state."""
