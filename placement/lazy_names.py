"""Lazy imports of a package's public names, so that importing the package loads neither Ray nor torch (pure)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for the ``__init__`` of ``package``, which import names on first use.

    Args:
        homes: Public names defined in each module, separated by spaces, keyed by module.
        modules: Public modules of the package, loaded in the same way.
    """

    found = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in found:
            known = ", ".join([*sorted(found), *modules])
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {known}")
        return getattr(importlib.import_module(found[name]), name)

    return get, lambda: sorted(found)
