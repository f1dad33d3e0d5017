"""Versions of stored data and of messages between processes; a newer version is rejected with a clear error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

RELEASE = "0.1.0"
"""The release of this source tree; pyproject.toml reads it here, and `elastic_ray.__version__` is it."""

PROTOCOL = 1
"""Number of the messages of drivers, controllers, workers and the allocator; it rises with every change of them."""


class VersionError(RuntimeError):
    """Error raised if processes from different elastic-ray releases cannot work together."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """Version of a process: its message protocol's number, and its release."""

    protocol: int
    release: str


def spoken() -> Spoken:
    """Return this process's version."""
    return Spoken(protocol=PROTOCOL, release=RELEASE)


def check_spoken(theirs: Spoken, they: str, we: str) -> None:
    """Raise VersionError if the other process uses a different protocol; the message names both (``they``, ``we``)."""
    ours = spoken()
    if theirs.protocol != ours.protocol:
        raise VersionError(
            f"{they} and {we} must speak the same protocol, but got {theirs.protocol} (elastic-ray {theirs.release}) "
            f"and {ours.protocol} (elastic-ray {ours.release}): install one release on all nodes; an allocator of "
            "another one is replaced once its jobs have ended"
        )


def check_format(told: Mapping[str, Any], newest: int) -> None:
    """Raise ValueError if stored data is no JSON object, or its ``format`` number (1 if missing) exceeds ``newest``."""
    if not isinstance(told, Mapping):
        raise ValueError(f"it must hold a JSON object, but holds {told!r:.40}")
    found = told.get("format", 1)
    if type(found) is not int or not 1 <= found <= newest:
        raise ValueError(f"its format must be from 1 to {newest}, but is {found!r}: a newer elastic-ray wrote it")
