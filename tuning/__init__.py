"""Sweeps: trials of Ray Tune and NNI as elastic jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from tuning.ray_tune import elastic
    from tuning.trials import Promise

_HOMES = {"Promise": "tuning.trials", "elastic": "tuning.ray_tune"}

__all__ = ["Promise", "elastic"]

__getattr__, __dir__ = lazy_names("tuning", _HOMES)
