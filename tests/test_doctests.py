"""Examples in docstrings print what they say."""

from __future__ import annotations

import contextvars
import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for package in ("elastic_ray", "placement", "tuning")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_the_docstrings_of_a_module_are_true(module: str) -> None:
    alone = contextvars.Context()  # a session that an example begins is no other test's
    failed, tried = alone.run(
        doctest.testmod, importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert tried and not failed


def test_there_are_some() -> None:
    assert len(MODULES) >= 5
