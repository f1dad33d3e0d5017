"""The epochs of a run, for a ``for`` loop and for loops that call."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ray.loop.api import current_session
from elastic_ray.run.current import check_present, session_of_thread


class Epochs:
    """The epochs still to train: ``remaining_epochs_until`` for loops that somebody else has written.

    Examples:
        >>> import elastic_ray as er
        >>> from elastic_ray.loop.epochs import Epochs
        >>> epochs = Epochs(2)
        >>> while not epochs.done:
        ...     epoch = epochs.begin_epoch()
        ...     epochs.end_epoch()
        >>> epoch
        1

    Args:
        epochs: number of epochs in all; 0 or more.

    Raises:
        TypeError: ``epochs`` is no integer.
        ValueError: ``epochs`` is negative.
    """

    def __init__(self, epochs: int) -> None:
        if isinstance(epochs, bool) or not isinstance(epochs, int):
            raise TypeError(f"epochs must be an integer, but got {epochs!r}")
        if epochs < 0:
            raise ValueError(f"epochs must be 0 or more, but got {epochs}")
        self._epochs = int(epochs)
        self._session = current_session()
        self._begun = self._within = False

    def join(self) -> None:
        """Join the job, as the first :meth:`begin_epoch` does: everything is built, nothing is trained yet.

        Afterwards this worker has the job's state and knows its place in the group.

        Raises:
            RuntimeError: passes of a loader of ``ray.train.torch.prepare_data_loader`` are the epochs already.
        """
        if not self._begun:
            self._begun = True
            if self._session.in_epochs and self._session.progress.epochs is None:
                raise RuntimeError(
                    "a loader of prepare_data_loader() was iterated before remaining_epochs_until(), and its passes "
                    "count as epochs: use remaining_epochs_until() around all loops over loaders, or not at all"
                )
            self._session.begin_epochs(self._epochs)

    @property
    def done(self) -> bool:
        """True if all epochs are trained or a policy has ended the training; joins the job first if necessary."""
        self.join()
        return self._session.progress.epoch >= self._epochs or self._session.adaptation.stopped

    def begin_epoch(self) -> int:
        """Start the next epoch; returns its number, from 0. For a worker that joins it is the one the others are in.

        Raises:
            RuntimeError: the one before has not ended, or there is none left.
        """
        if self._within:
            raise RuntimeError("begin_epoch() was called twice: call end_epoch() at the end of each epoch")
        if self.done:
            raise RuntimeError(f"all {self._epochs} epochs have been trained: ask done before begin_epoch()")
        self._session.ledger.begin_epoch()
        self._within = True
        return self._session.progress.epoch

    def end_epoch(self) -> None:
        """End the epoch in progress.

        Raises:
            RuntimeError: none is.
        """
        if not self._within:
            raise RuntimeError("end_epoch() was called without begin_epoch()")
        check_present(self._session)
        self._within = False
        self._session.passes.end_epoch()
        if self.done:
            self._session.ledger.begin_epoch()

    def __iter__(self) -> Iterator[int]:
        try:
            while not self.done:
                yield self.begin_epoch()
                self.end_epoch()
            self._session.ledger.begin_epoch()
        except GeneratorExit:
            pass  # the loop was left by break or return
        if session_of_thread() is self._session:
            self._session.leave_epochs()


def remaining_epochs_until(epochs: int) -> Iterator[int]:
    """Return the epochs still to train, from the present one on; for a worker that joins, from where the others are.

    Args:
        epochs: number of epochs in all; 0 or more.

    Raises:
        TypeError: ``epochs`` is no integer.
        ValueError: ``epochs`` is negative.
    """
    return iter(Epochs(epochs))
