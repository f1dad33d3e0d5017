"""Loads what the driver's script has pickled by value, and gives its classes the names that they have there.

A worker's ``__main__`` is Ray's. What the script's ``__main__`` defines travels by value, and processes that the train
function starts (a DataLoader's) cannot send it back by name unless ``__main__`` has it here as well.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

_MAIN = "__main__"
_MAKERS = ("_make_skeleton_class", "_make_skeleton_enum", "_make_function")  # cloudpickle's
_given: set[str] = set()


def load(packed: bytes) -> Any:
    """Unpickle, as ``pickle.loads``; classes and functions of the script's ``__main__`` are found by name from now on.

    Names that this process's own ``__main__`` has are left alone.
    """
    unpickler = _Unpickler(io.BytesIO(packed))
    loaded = unpickler.load()
    main = sys.modules[_MAIN]
    for each in unpickler.made:
        name = getattr(each, "__qualname__", "")
        of_the_script = getattr(each, "__module__", None) == _MAIN and name.isidentifier()
        if of_the_script and (name in _given or not hasattr(main, name)):
            _given.add(name)
            setattr(main, name, each)
    return loaded


class _Unpickler(pickle.Unpickler):
    """Notes the classes and functions that cloudpickle makes anew."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """Find a class as ``pickle`` does, and note cloudpickle's makers."""
        found = super().find_class(module, name)
        return self._noting(found) if name in _MAKERS and "cloudpickle" in module else found

    def _noting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            self.made.append(make(*args, **kwargs))
            return self.made[-1]

        return made
