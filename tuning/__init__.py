"""Hyperparameter sweeps with Ray Tune or NNI, where each trial is an elastic job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from tuning.ray_tune import elastic
    from tuning.rung_sizes import Sweep
    from tuning.sweep import stop_sweep
    from tuning.trials import Promise

_HOMES = {
    "tuning.ray_tune": "elastic",
    "tuning.rung_sizes": "Sweep",
    "tuning.sweep": "stop_sweep",
    "tuning.trials": "Promise",
}

__all__ = ["Promise", "Sweep", "elastic", "stop_sweep"]

__getattr__, __dir__ = lazy_names("tuning", _HOMES)
