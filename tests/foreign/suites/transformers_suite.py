"""A pytest plugin: transformers' own tests of ``Trainer`` see elastic-ray's under that name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ray.integrations.huggingface import Trainer
from elastic_ray.run.current import set_session

theirs: Any = sys.modules["transformers"]  # a lazy module, which replaces itself in its first import
theirs.Trainer = Trainer


@pytest.fixture(autouse=True)
def own_run() -> Iterator[None]:
    """Each test is a run of its own."""
    set_session(None)
    yield
    set_session(None)
