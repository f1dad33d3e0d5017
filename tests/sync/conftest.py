"""Ranks for the tests of synchronisation: a few processes that all tests of a run share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loop.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """See `Ranks`."""
    made = Ranks()
    yield made
    made.close()
