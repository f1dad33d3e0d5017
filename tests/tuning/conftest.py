"""A cluster for a module of sweeps, whose processes one test leaves to the next; nothing may be left at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.local_cluster import LocalCluster

SETTLE_S = 45.0  # a sweep's processes wait 10 s for a trial that does not come


@pytest.fixture(scope="module")
def sweep_cluster(shared_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """The module's cluster."""
    yield shared_cluster
    deadline = time.monotonic() + SETTLE_S
    while (leaks := shared_cluster.leaks()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not leaks, f"left {SETTLE_S:g} s after the last sweep:\n" + "\n".join(leaks)
