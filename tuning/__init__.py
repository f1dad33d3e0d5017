"""Sweeps: trials of Ray Tune and NNI as elastic jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from tuning.ray_tune import elastic
    from tuning.rung_sizes import Sweep
    from tuning.sweep import stop_sweep
    from tuning.trials import Promise

_HOMES = {
    "Promise": "tuning.trials",
    "Sweep": "tuning.rung_sizes",
    "elastic": "tuning.ray_tune",
    "stop_sweep": "tuning.sweep",
}

__all__ = ["Promise", "Sweep", "elastic", "stop_sweep"]

__getattr__, __dir__ = lazy_names("tuning", _HOMES)
