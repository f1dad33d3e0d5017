"""What of a model depends on the group: gradients between two steps, and replicas that drift (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator
    from elastic_ray.consensus.intents import Announced


class GroupDependent(Protocol):
    """One model's gradients between two optimizer steps, as far as a change of group concerns them."""

    @property
    def local(self) -> bool:
        """Whether they differ from rank to rank, so that a planned change had better wait."""

    @property
    def is_open(self) -> bool:
        """Whether gradients wait for an update."""

    @property
    def drifts(self) -> bool:
        """Whether models differ from rank to rank by design, until they are averaged."""

    @property
    def settled(self) -> bool:
        """Whether they do not after the steps that are committed, and this rank holds all that is to be saved."""

    @property
    def gives_statistics(self) -> bool:
        """True if the gradient noise scale is measured."""

    @property
    def divided(self) -> bool:
        """Whether optimizer state lies with several ranks; the same on all."""

    @property
    def meets_in_passes(self) -> bool:
        """Whether forward and backward passes wait for other ranks, besides reductions of gradients."""

    @property
    def tabled(self) -> bool:
        """Whether rows of tables do, which only rank 0 saves."""

    def fix_drift(self) -> int:
        """What comes after the step that ranks agree on is settled here; a digest of it, equal on all ranks."""

    @property
    def marker(self) -> int:
        """Which average was the last to end on this rank; larger is later, 0 before the first."""

    @property
    def scaler(self) -> object | None:
        """AMP's ``GradScaler``; None without AMP."""

    def after_step(self, *, agree_on_scale: bool) -> None:
        """All ranks have committed a step that trained: average models, where it is time.

        Args:
            agree_on_scale: the scaler is that of a model which drifts, too, so that ranks may have updated it
                otherwise, while the gradients of this one are added up.
        """

    def join(self, what: Announced) -> None:
        """This rank has no sample in a step: take part in what others have announced of the model."""

    def collapse(self, *, gather: bool = True) -> None:
        """Make models one that differ from rank to rank.

        Args:
            gather: have rank 0 hold the whole state of optimizers.
        """

    def prepare_to_save(self) -> None:
        """Rank 0 is about to save: have it hold what only other ranks hold; all ranks call it."""

    def reconcile(self, communicator: Communicator, marker: int, *, holds: bool, counts: bool) -> None:
        """The same in a new group, before its ranks exchange state, among those that hold a trained one.

        Args:
            marker: the latest of their markers.
            holds: whether this rank holds such a state.
            counts: whether it has that marker, and adds to the one model.
        """

    def before_change(self, stays: Sequence[bool]) -> None:
        """All ranks are here, and the group is about to change: make what differs from rank to rank equal.

        Args:
            stays: whether each rank is in the next group as well; what only others hold is handed over.

        Raises CommunicationFailedError: the present group broke meanwhile.
        """

    @property
    def strategy_name(self) -> str:
        """Of the strategy in force."""

    def set_strategy(self, strategy: object) -> None:
        """Go on with another one from the next step on; raises ValueError or TypeError where it cannot be."""

    @property
    def strategy_key(self) -> str | None:
        """Tells strategies apart of which step times are not to be mixed; None while one is being chosen."""

    def enter_group(self) -> None:
        """A group was entered, and all ranks hold the same state."""
