"""Check at import time that a library still has the methods that an integration overrides."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

logger = logging.getLogger(__name__)

TESTED = {"transformers": "5.24", "accelerate": "1.15", "lightning": "2.6"}
"""Newest minor version of each that was tested: docs/gpus.md has all."""


def check_overridden(library: str, extra: str, names: Mapping[type, Iterable[str]]) -> None:
    """Raise ImportError if a library's classes lack methods or properties that elastic-ray overrides or calls.

    If the library is newer than the newest tested version, a warning is logged and the library is used anyway.
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
    """True if ``version``, or the release that it comes before, is of a later minor release than ``tested``."""
    try:
        return Version(version).release[:2] > Version(tested).release[:2]
    except InvalidVersion:
        return False


def _version(library: str) -> str:
    try:
        found: str | None = version(library)  # None without metadata in its folder
    except PackageNotFoundError:
        found = None
    return found or "of an unknown version"
