"""Ray for tests: a small cluster of this machine's own, and what must be true of it when a test ends."""

from __future__ import annotations

import collections
import functools
import gc
import os
import re
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.expected_skips import unexpected
from tests.local_cluster import LocalCluster, clean_up  # sets Ray's environment: before anything imports Ray

SETTLE_S = 30.0  # of a machine that others use, too
NEW_EXAMPLES = "HYPOTHESIS_NEW_EXAMPLES"
# A module that names one of these starts a cluster or other programs, or else groups of ranks. Under pytest-xdist the
# tests of each kind run one after the other, beside the other kind's or beside those that only compute.
GROUPS = {
    "clusters": r"local_cluster|ray_(cluster|nodes)|shared_cluster|^\s*import ray\b|tests\.tuning"
    r"|subprocess|multiprocessing|free_port",
    "shards": r"tests\.sync\.sharded_parameters",
    "ranks": r"\branks\b|tests\.loop",
}

_unexpected_skips: list[str] = []

# A shared machine stalls now and then; pytest's own timeout finds what hangs. Every run draws the same examples, so
# that a test passes or fails for what was changed. With HYPOTHESIS_NEW_EXAMPLES=1 a run draws new ones, as .ci/run's
# second stage does, and what they find becomes an `@example`.
hypothesis.settings.register_profile("same examples", deadline=None, derandomize=True)
hypothesis.settings.register_profile("new examples", deadline=None, print_blob=True)
hypothesis.settings.load_profile("new examples" if os.environ.get(NEW_EXAMPLES) == "1" else "same examples")

# A run starts some hundred processes that import the product: without bytecode each compiles it, for a second or two.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collection makes out of garbage collection, which else walks millions of objects in each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="module")
def shared_cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """A module's cluster; ``pytestmark = pytest.mark.ray_cluster(num_gpus=4)`` sets its head."""
    marker = request.node.get_closest_marker("ray_cluster")
    cluster = LocalCluster(**(marker.kwargs if marker else {}))
    yield cluster
    cluster.shutdown()


@pytest.fixture
def ray_cluster(shared_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """The module's cluster for one test: its nodes are taken away again, and nothing of a job may be left."""
    yield shared_cluster
    deadline = time.monotonic() + SETTLE_S
    while (leaks := shared_cluster.leaks()) and time.monotonic() < deadline:
        time.sleep(0.1)
    shared_cluster.clear()
    shared_cluster.remove_added_nodes()
    assert not leaks, f"left {SETTLE_S:g} s after the test:\n" + "\n".join(leaks)


@pytest.fixture(autouse=True)
def own_run() -> Iterator[None]:
    """No test continues in the run of this process that another one has left."""
    yield
    if "elastic_ray.run.current" in sys.modules:
        sys.modules["elastic_ray.run.current"].set_worker_session(None)


@functools.lru_cache
def group_of(module: Path) -> str | None:
    """What a test module starts, as its text says; None if nothing."""
    text = module.read_text()
    return next((name for name, signs in GROUPS.items() if re.search(signs, text, re.MULTILINE)), None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that start processes, which measure and wait, in groups; leave the first case of each matrix in the
    short run, make each ``every``-th thorough and the others slow."""
    cases = collections.Counter[str]()
    for item in items:
        if (group := group_of(item.path)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        matrix = item.get_closest_marker("matrix")
        if matrix is not None:
            name = item.nodeid.partition("[")[0]
            if cases[name] % matrix.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            elif cases[name]:
                item.add_marker(pytest.mark.thorough)
            cases[name] += 1


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    if reason and not hasattr(report, "wasxfail") and unexpected(reason):
        _unexpected_skips.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect skips that nobody expects."""
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Collect skips of whole modules that nobody expects."""
    _note_skip(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skips that fail the run."""
    for each in _unexpected_skips:
        terminalreporter.write_line(f"skipped, which tests/expected_skips.py does not list: {each}", red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run with unexpected skips; Ray's logs stay after a failure."""
    if _unexpected_skips:
        session.exitstatus = exitstatus = pytest.ExitCode.TESTS_FAILED
    clean_up(failed=exitstatus != 0)
