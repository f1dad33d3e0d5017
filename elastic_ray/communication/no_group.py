"""Placeholder for a group's parts before there is a group (pure)."""

from __future__ import annotations

from typing import Any


class NoGroup:
    """Placeholder that raises RuntimeError on any use."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the session has not entered a generation yet, or has left the last one")
