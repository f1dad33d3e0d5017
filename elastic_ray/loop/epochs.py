"""Remaining epochs of a run, as an iterator for ``for`` loops and as an object for other loops."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ray.loop.api import current_session
from elastic_ray.run.current import replaced_error, session_of_thread


class Epochs:
    """Remaining epochs of a run, for training loops that cannot iterate over ``remaining_epochs_until``.

    Examples:
        >>> import elastic_ray as er
        >>> from elastic_ray.loop.epochs import Epochs
        >>> epochs = Epochs(2)
        >>> while not epochs.done:
        ...     epoch = epochs.start_epoch()
        ...     epochs.end_epoch()
        >>> epoch
        1

    Args:
        epochs: total number of epochs; 0 or more.

    Raises:
        TypeError: ``epochs`` is not an integer.
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
        """Join the job before the first epoch; call this once models and loaders are built.

        The call blocks until this worker has the job's state and knows its rank in the group. Without this call, the
        first :meth:`start_epoch` joins.

        Raises:
            RuntimeError: passes over a loader from ``ray.train.torch.prepare_data_loader`` already count as epochs.
        """
        if not self._begun:
            self._begun = True
            if self._session.in_epochs and self._session.progress.epochs is None:
                raise RuntimeError(
                    "a loader of prepare_data_loader() was iterated before remaining_epochs_until(), and its passes "
                    "count as epochs: use remaining_epochs_until() around all loops over loaders, or not at all"
                )
            self._session.start_epochs(self._epochs)

    @property
    def done(self) -> bool:
        """True if all epochs are done or a policy has ended the training; reading this property joins the job first."""
        self.join()
        return self._session.progress.epoch >= self._epochs or self._session.adaptation.stopped

    def start_epoch(self) -> int:
        """Start the next epoch and return its number, from 0; a joining worker starts at the job's current epoch.

        Raises:
            RuntimeError: the previous epoch has not ended, or no epoch remains.
        """
        if self._within:
            raise RuntimeError("start_epoch() was called twice: call end_epoch() at the end of each epoch")
        if self.done:
            raise RuntimeError(f"all {self._epochs} epochs have been trained: ask done before start_epoch()")
        self._session.ledger.start_epoch()
        self._within = True
        return self._session.progress.epoch

    def end_epoch(self) -> None:
        """End the current epoch.

        Raises:
            RuntimeError: no epoch has been started.
        """
        if not self._within:
            raise RuntimeError("end_epoch() was called without start_epoch()")
        if self._session.replaced:
            raise replaced_error()
        self._within = False
        self._session.passes.end_epoch()
        if self.done:
            self._session.ledger.start_epoch()

    def __iter__(self) -> Iterator[int]:
        try:
            while not self.done:
                yield self.start_epoch()
                self.end_epoch()
            self._session.ledger.start_epoch()
        except GeneratorExit:
            pass  # the loop was left by break or return
        if session_of_thread() is self._session:
            run = self._session.run  # which records this rank's state before later code changes it
            if run.synced and run.group.world_size > 1:
                run.replicas.leave(run.progress.steps, run.progress.loader_steps)


def remaining_epochs_until(epochs: int) -> Iterator[int]:
    """Iterate over the numbers of the remaining epochs; a joining worker starts at the job's current epoch.

    Every worker must iterate. The first epoch starts once this worker has joined the job and received its state.

    Args:
        epochs: total number of epochs; 0 or more.

    Raises:
        TypeError: ``epochs`` is not an integer.
        ValueError: ``epochs`` is negative.
    """
    return iter(Epochs(epochs))
