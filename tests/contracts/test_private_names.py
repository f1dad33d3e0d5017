"""Private names of other packages: each use is listed with its reason, and the installed releases have them all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
from typing import Any

import pytest

from tests.contracts.finding import uses
from tests.contracts.private_names import NOT_PRIVATE, PRIVATE_NAMES, PrivateNames

pytestmark = pytest.mark.xdist_group("private names")  # one process reads the tree, once

ALL = [pytest.param(row, name, id=f"{row.home}-{name}") for row in PRIVATE_NAMES for name in row.names]


def test_every_use_is_listed() -> None:
    listed = {name for row in PRIVATE_NAMES for name in (*row.names, *row.elsewhere)}
    imported = {f"{row.home}:{name}" for row in PRIVATE_NAMES for name in row.names}
    unknown = {
        name: places
        for name, places in uses().items()
        if name not in NOT_PRIVATE and name not in (imported if ":" in name else listed)
    }
    assert not unknown, "list these in tests/contracts/private_names.py, with the reason and what would do without"


def test_every_row_is_used_and_says_why() -> None:
    used = {name.partition(":")[2] or name for name in uses()}
    for row in PRIVATE_NAMES:
        assert row.names and row.why and row.instead, row.home
        assert not [n for n in (*row.names, *row.elsewhere) if n.startswith("_") and n not in used], (
            f"nobody uses these of {row.home}"
        )


@pytest.mark.thorough
@pytest.mark.parametrize(("row", "name"), ALL)
def test_the_installed_release_has_it_as_it_is_used(row: PrivateNames, name: str) -> None:
    home = _home(row.home)
    assert _has(home, name), f"{row.home} has no {name} any more, which is for: {row.why}; instead: {row.instead}"
    if name in row.takes:
        parameters = inspect.signature(getattr(home, name)).parameters
        assert not set(row.takes[name]) - parameters.keys(), f"{name} takes {', '.join(parameters)}"


def test_what_is_missing_is_noticed() -> None:
    row = PrivateNames(home="os", names=("_no_such",), why="-", instead="-")
    with pytest.raises(AssertionError, match="os has no _no_such any more"):
        test_the_installed_release_has_it_as_it_is_used(row, "_no_such")


def _home(path: str) -> Any:
    """The module or class; skips the test where the package is not installed."""
    module, _, attributes = path.partition(":")
    if importlib.util.find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{module.split('.')[0]} is not installed")
    return functools.reduce(getattr, filter(None, attributes.split(".")), importlib.import_module(module))


def _has(home: Any, name: str) -> bool:
    """True if it is there, or an instance will have it: a slot, a field, or an assignment in a method or the module."""
    if hasattr(home, name) or (dataclasses.is_dataclass(home) and name in {f.name for f in dataclasses.fields(home)}):
        return True
    for kind in inspect.getmro(home) if inspect.isclass(home) else (home,):
        with contextlib.suppress(TypeError, OSError):
            if re.search(rf"\b{name}\b(: [^=\n]+)? =|\b{name}: |\"{name}\"", inspect.getsource(kind)):
                return True
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(f"{getattr(home, '__name__', '')}.{name}")
        return True
    return False
