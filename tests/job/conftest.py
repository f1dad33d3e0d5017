"""What tests of a job's parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_ray.job.journal import Journal


@pytest.fixture
def journal() -> Iterator[Journal]:
    """A journal without a control store, which tries again as long as it is open; its thread ends with the test."""
    journal = Journal("test")
    yield journal
    journal.close(delete=False)
