"""Examples in docstrings print what they say, and each public class has one."""

from __future__ import annotations

import contextvars
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for package in ("elastic_ray", "placement", "tuning")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]
PUBLIC = ("elastic_ray", "elastic_ray.adaptation", "elastic_ray.sync", "placement", "placement.simulator", "tuning")
NEED_A_CLUSTER_OR_A_TRACE = {"JobHandle", "Report", "SimulationReport"}


@pytest.mark.parametrize("module", MODULES)
def test_the_docstrings_of_a_module_are_true(module: str) -> None:
    alone = contextvars.Context()  # a session that an example begins is no other test's
    failed, tried = alone.run(
        doctest.testmod, importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert tried and not failed


@pytest.mark.parametrize("package", PUBLIC)
def test_a_public_class_has_an_example(package: str) -> None:
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in module.__all__}
    classes = {n: v for n, v in values.items() if inspect.isclass(v) and not issubclass(v, BaseException)}
    missing = {name for name, value in classes.items() if ">>> " not in (inspect.getdoc(value) or "")}
    assert missing <= NEED_A_CLUSTER_OR_A_TRACE
