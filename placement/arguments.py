"""Checks of names given by users; an error suggests the most similar valid name (pure)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self


class NamesArguments:
    """Base class whose constructor rejects unknown arguments and suggests the most similar valid name."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Check the argument names; their values are checked by the class itself."""
        construct: Any = cls.__init__
        check_argument_names(cls.__name__, named, tuple(inspect.signature(construct).parameters)[1:])
        return super().__new__(cls)


def check_argument_names(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError for an unknown argument of ``what``; the message suggests the most similar known name."""
    for name in given:
        if name not in known:
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}{meant(name, known)}")


def meant(name: object, known: Collection[str]) -> str:
    """Return the hint that ends an error message about an unknown name: the most similar name, or all known names."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(known))}"
