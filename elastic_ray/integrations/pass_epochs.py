"""Epochs of a train function that counts them by itself: each pass over the first loader that it iterates is one.

Such a loop, over a plain ``range``, runs from its beginning in every worker. A worker that joins later thus comes by
the earlier passes, too: there it gets a single batch, so that what the loop's body sets is set, and nothing that the
code does counts. It does so alone, before it joins, as far as it knows where the others are; and for what is left
after it has joined.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.loop.api import get_context
from elastic_ray.run.registry import HookPoint
from elastic_ray.session.session import Session

logger = logging.getLogger(__name__)


class PassEpochs:
    """See the module's text.

    Args:
        session: of the run.
    """

    def __init__(self, session: Session) -> None:
        self._run = weakref.ref(session)
        self._models: list[torch.nn.Module] = []
        self._first: weakref.ref[Any] | None = None
        self._declared = False  # the code uses remaining_epochs_until
        self._passes = 0  # over the first loader that the code has come to
        self._goes_by = self._within = False

    @property
    def _session(self) -> Session:
        session = self._run()
        assert session is not None, "its code runs"
        return session

    def add_model(self, module: torch.nn.Module) -> None:
        """A model that the code trains."""
        self._models.append(module)

    def begin_pass(self, loader: object) -> bool:
        """The code comes to a pass over a loader: whether it is one to go by.

        Raises:
            WorkerDismissed, UnsafeStateError: as :meth:`Session.sync_point`.
            RuntimeError: the job goes on from a checkpoint that the code has not asked for.
            CommunicationFailedError: this worker's code is ahead of the others'; another worker takes its place.
        """
        if self._first is None:
            self._declared = self._session.in_epochs
        if self._declared:
            return False
        if self._first is None or self._first() is None:  # or the code makes its loaders anew in each epoch
            self._first = weakref.ref(loader)
        if self._first() is loader:
            self._goes_by = self._comes_before(self._passes)
            self._passes += 1
            if not self._goes_by:
                self._begin_epoch()
        return self._goes_by

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """The time in which the body of a pass runs that does not count."""
        kept = [(buffer, buffer.clone()) for module in self._models for buffer in module.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)
            for module in self._models:
                module.zero_grad()

    def _comes_before(self, number: int) -> bool:
        """Whether the others have left the pass of this number behind; joins them where it is not known to be so."""
        session = self._session
        if not session.synced:
            if number < session.start.epochs_behind:
                session.ledger.begin_replay(between_epochs=True)
                return True
            self._join(session.start.first_epoch())
        here = session.start.first_epoch() + number
        if here < session.progress.epoch:
            session.ledger.begin_replay(between_epochs=True)
            return True
        if here > session.progress.epoch and not self._within:
            raise CommunicationFailedError(
                f"the train function began with epoch {here}, while the others are in epoch {session.progress.epoch}"
            )
        return False

    def _join(self, first: int) -> None:
        """Become part of the job, and have the last epoch ended when the code returns."""
        session = self._session
        if get_context().get_world_rank() == 0:
            logger.info(
                "the train function counts its epochs by itself: each pass over its first loader is one, from %d on; "
                "workers that join later get one batch of each earlier pass, for what the loop's body sets",
                first,
            )
        session.begin_epochs(None)
        session.registry.add_hook(HookPoint.BEFORE_END, self._end_epoch)

    def _begin_epoch(self) -> None:
        self._end_epoch()
        self._within = True
        self._session.ledger.begin_epoch()

    def _end_epoch(self) -> None:
        """The code has come to the next epoch, or to its end."""
        if self._within:
            self._within = False
            self._session.passes.end_epoch()
            self._session.ledger.begin_epoch()


_epochs: weakref.WeakKeyDictionary[Session, PassEpochs] = weakref.WeakKeyDictionary()


def epochs_of(session: Session) -> PassEpochs:
    """Those of a run."""
    return _epochs.setdefault(session, PassEpochs(session))
