"""Sums over all ranks and steps that stay correct when workers join, leave or fail."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from elastic_ray.loop.api import current_session
from elastic_ray.run.current import session_of_thread
from elastic_ray.state.codec import as_float

if TYPE_CHECKING:
    from elastic_ray.session.session import Session


NUMBERS = itertools.count(2)


class _Sum(float):
    """Sum, with the amount that ``+=`` has just added to it."""

    added: float = 0.0

    def __iadd__(self, other: float) -> _Sum:
        total = _Sum(float(self) + float(other))
        total.added = self.added + float(other)
        return total


as_float(_Sum)  # a best loss, say, that user code has read and registered


class Accumulator(Mapping[str, float]):
    """Named sums, such as losses and hits, that every rank adds to inside a loop over a loader.

    Values added during a step count once the step is committed. If a failure voids the step, its values are discarded,
    and are added again when the step is drawn again. Contributions from committed steps are kept even if their worker
    is lost. Reading a sum returns the total over all ranks and committed steps, which is the same on every rank. Read
    sums on every rank, because reading after a ``break`` out of a loop may commit the last step. Between two passes of
    a loader, all steps are committed. Every rank must add to the same names in a step, even if it only adds 0.0.

    Examples:
        >>> from elastic_ray import AdaptiveDataLoader, remaining_epochs_until
        >>> loader = AdaptiveDataLoader([1.0, 2.0, 3.0, 4.0], batch_size=2)
        >>> for epoch in remaining_epochs_until(1):
        ...     totals = Accumulator()
        ...     for x in loader:
        ...         totals["sum"] += x.sum().item()
        ...         totals["samples"] += len(x)
        >>> totals["sum"] / totals["samples"]
        2.5
    """

    def __init__(self) -> None:
        self._session = session = current_session()
        self._start_in(session)
        self._number = 0 if session.synced else -next(NUMBERS)  # of one that an import makes before there is a run

    def _join_present_run(self) -> None:
        """Attach to the current run; if a process trains several times, sums belong to the run that adds to them."""
        present = session_of_thread()
        if present is None or present is self._session:
            return
        if self._session.synced:
            self._start_in(present)
        else:
            self._session, self._key = present, (-1, self._number)

    def _start_in(self, session: Session) -> None:
        """Start at 0 in a run; raises RuntimeError in a step of a round whose ranks make unequally many steps."""
        caller = sys._getframe(2)
        scope = session.ledger.accumulator_scope
        number = session.ledger.number_in_step(f"{caller.f_code.co_name} {caller.f_lineno}")
        step = session.ledger.outermost
        if number is not None and step is not None and step.leads and session.registry.gives_back:
            raise RuntimeError(
                "an Accumulator must be made before the loop over the training data under a strategy with "
                "give_back=True, but this one is made in a step: ranks make unequally many steps there, and would have "
                "unlike Accumulators. Make one before the loop"
            )
        self._session = session
        self._key = session.run.sums.new_key(scope) if number is None else (scope, number)
        if number is not None:
            session.progress.reset_sums(self._key)

    def __getitem__(self, name: str) -> float:
        return _Sum(self._sums().get(name, 0.0))

    def __setitem__(self, name: str, value: float) -> None:
        if not isinstance(value, _Sum):
            raise TypeError(f"sums are added to: write accumulator[{name!r}] += value, not = value")
        self.add(name, value.added)

    def add(self, name: str, value: float) -> None:
        """Add ``value`` to this rank's contribution to the sum ``name``; same as ``accumulator[name] += value``."""
        self._join_present_run()
        self._commit_abandoned(self._session)  # what code adds after `break` belongs to the step around that loop
        if self._session.ledger.depth == 0:
            raise RuntimeError(
                f"accumulator[{name!r}] must be added to inside a loop over an AdaptiveDataLoader, where each rank "
                "has its own samples: a sum that a rank kept to itself until the loop's end would be lost with it. "
                "What is the same on every rank needs no Accumulator"
            )
        self._session.progress.sums.setdefault(self._key, {})  # also if made in a step that was lost
        self._session.run.sums.add(self._session.ledger.depth, self._key, name, float(value))

    def reset(self) -> None:
        """Discard all sums, so that every name starts at 0; call this on every rank, between two passes of a loader."""
        self._run_or_present().progress.reset_sums(self._key)

    def _run_or_present(self) -> Session:
        """Return the run that has added to the sums; if none has, return the current run."""
        if not self._session.synced:
            self._join_present_run()
        return self._session

    def _sums(self) -> dict[str, float]:
        session = self._run_or_present()
        self._commit_abandoned(session)
        return session.progress.sums.get(self._key, {})

    def _commit_abandoned(self, session: Session) -> None:
        """Commit the steps that were left by ``break``."""
        if session.synced and session.ledger.abandoned:
            session.passes.complete()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums())

    def __len__(self) -> int:
        return len(self._sums())
