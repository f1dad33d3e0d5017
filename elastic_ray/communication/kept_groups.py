"""Gloo groups with operations that may never end: kept until they have."""

from __future__ import annotations

import threading
from typing import Any

_KEPT: list[tuple[Any, Any]] = []  # operations, and their groups
_KEEPING = threading.Lock()


def keep_group(work: Any, group: Any) -> None:
    """Keep a group until a started operation of it has ended."""
    drop_ended_groups()
    with _KEEPING:
        _KEPT.append((work, group))


def drop_ended_groups() -> None:
    """Release groups whose operations have ended."""
    with _KEEPING:
        ended = [each for each in _KEPT if each[0].is_completed()]
        _KEPT[:] = [each for each in _KEPT if each not in ended]
    del ended  # joins their threads, which nobody else is to wait for
