"""Error for invalid input from users."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator


class InputError(ValueError):
    """Error raised for an invalid trace, profile, price table, cluster file or option.

    The message names the location and a valid alternative.
    """


@contextlib.contextmanager
def reading(what: str, *others: type[Exception]) -> Iterator[None]:
    """Convert an error while reading the file ``what``, or an error of a type in ``others``, to InputError."""
    kinds: tuple[type[Exception], ...] = (OSError, UnicodeDecodeError, *others)
    try:
        yield
    except kinds as error:
        raise InputError(f"{what} cannot be read: {error}") from error


def check_once(what: str, names: Collection[str], error: type[ValueError] = InputError) -> None:
    """Raise an error if a name occurs twice; ``what`` describes the names in the message, such as "node type"."""
    counted = list(names)
    doubles = sorted({name for name in counted if counted.count(name) > 1}) if len(set(counted)) < len(counted) else []
    if doubles:
        raise error(f"every {what} must occur once, but {', '.join(doubles)} occurs more than once")
