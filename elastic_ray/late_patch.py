"""SHELL: patches of other libraries' modules that take effect once a module is imported, without importing it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType


@contextlib.contextmanager
def patched(home: str, name: str, value: object) -> Iterator[None]:
    """Replace ``home.name`` with ``value`` within the context, as soon as the module ``home`` is imported."""
    before: list[object] = []

    def put(module: ModuleType) -> None:
        before.append(getattr(module, name))
        setattr(module, name, value)

    late = when_imported(home, put)
    try:
        yield
    finally:
        if late in sys.meta_path:
            sys.meta_path.remove(late)
        if before:
            setattr(sys.modules[home], name, before[0])


def when_imported(home: str, then: Callable[[ModuleType], None]) -> object:
    """Call ``then`` with the module ``home``, now or once it is imported; return the entry of ``sys.meta_path``."""
    late = _WhenImported(home, then)
    if home in sys.modules:
        then(sys.modules[home])
    else:
        sys.meta_path.insert(0, late)
    return late


class _WhenImported(importlib.abc.MetaPathFinder):
    """Import hook that calls a function once a module has been imported."""

    def __init__(self, home: str, then: Callable[[ModuleType], None]) -> None:
        self._home, self._then = home, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._home:
            return None
        # Another of this kind may wait for the same module.
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (each.find_spec(name, path, target) for each in later)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
