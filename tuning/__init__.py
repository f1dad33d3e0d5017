"""Sweeps: trials of Ray Tune and NNI as elastic jobs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuning.ray_tune import elastic
    from tuning.trials import Promise

_HOMES = {"Promise": "tuning.trials", "elastic": "tuning.ray_tune"}

__all__ = ["Promise", "elastic"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tuning' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
