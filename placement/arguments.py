"""Names that users give: one that there is not is answered with the one that is like it (pure)."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def names_arguments(kind: _Class) -> _Class:
    """Class decorator: an argument that the class does not have is answered with the one that is like it."""
    construct: Any = kind.__init__  # type: ignore[misc]
    known = tuple(inspect.signature(kind).parameters)

    @functools.wraps(construct)
    def checked(self: Any, *arguments: Any, **named: Any) -> None:
        check_argument_names(kind.__name__, named, known)
        construct(self, *arguments, **named)

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def check_argument_names(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse arguments that there are not.

    Raises:
        TypeError: names the argument, and the one that is meant.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}{meant(name, known)}")


def meant(name: object, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the known one that is like it, or all of them."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(known))}"
