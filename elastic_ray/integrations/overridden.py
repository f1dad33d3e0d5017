"""Whether a library still has what an integration overrides: said by name when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version


def check_overridden(library: str, extra: str, names: Mapping[type, Iterable[str]]) -> None:
    """Check that classes of another library have the methods and properties that we override or call.

    Args:
        library: its distribution's name.
        extra: of elastic-ray, which installs a version that has them.
        names: by class.

    Raises:
        ImportError: one is missing; the message names all that are.
    """
    gone = [f"{owner.__name__}.{name}" for owner, each in names.items() for name in each if not hasattr(owner, name)]
    if gone:
        raise ImportError(
            f"elastic-ray builds on {', '.join(gone)} of {library}, which {library} {_version(library)} does not have; "
            f"install a version that it was written for: pip install 'elastic-ray[{extra}]'"
        )


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "of an unknown version"
