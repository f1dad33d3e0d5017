"""Tests that start clusters or programs (subprocess, say) run one after the other, as ``conftest.py`` has it."""

from __future__ import annotations

import os

import pytest


def test_those_that_start_programs_are_one_group(request: pytest.FixtureRequest) -> None:
    """The plugin that distributes tests and pytest's newest version do not understand each other about groups."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not request.config.getvalue("loadgroup"):
        pytest.skip("there are groups under pytest -n 2 --dist loadgroup alone")
    assert request.node.nodeid.endswith("@clusters")
