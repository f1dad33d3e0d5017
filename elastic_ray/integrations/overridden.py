"""Checks that a library still has what an integration overrides; reported by name when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)

TESTED = {"transformers": "5.24", "accelerate": "1.15", "lightning": "2.6"}
"""Newest minor version of each that was tested: docs/gpus.md has all."""


def check_overridden(library: str, extra: str, names: Mapping[type, Iterable[str]]) -> None:
    """Check that classes of another library have the methods and properties that we override or call.

    A library that is newer than what was tested is reported, and used.

    Args:
        extra: of elastic-ray, which installs a version that has them.

    Raises ImportError: one is missing; the message names all that are.
    """
    gone = [f"{owner.__name__}.{name}" for owner, each in names.items() for name in each if not hasattr(owner, name)]
    if gone:
        raise ImportError(
            f"elastic-ray builds on {', '.join(gone)} of {library}, which {library} {_version(library)} does not have; "
            f"install a version that it was written for: pip install 'elastic-ray[{extra}]'"
        )
    if is_newer(here := _version(library), TESTED[library]):
        logger.warning("%s %s is newer than %s, the newest that was tested", library, here, TESTED[library])


def is_newer(version: str, tested: str) -> bool:
    """Return True if a version is of a later minor release than the one that was tested."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    return len(numbers) == 2 and numbers > [int(part) for part in tested.split(".")]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "of an unknown version"
