"""Public names that are loaded on first use, so that importing a package loads neither Ray nor torch (pure)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What a package's ``__init__`` is to have as ``__getattr__`` and ``__dir__``.

    Args:
        homes: the module of each public name.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: sorted(homes)
