"""Discrete-event simulation of a cluster: a trace, true profiles, and the allocator's own core.

    from placement.simulator import simulate
    report = simulate("workload-6.csv", "profiles", "aws:16x4", rules="pollux", policy="tiresias")
    report.avg_jct_s

The simulator has no policy of its own: it drives ``placement.allocator.core.AllocatorCore``, the class that runs live.
Names are loaded on first use, so that ``python -m placement.simulator`` can ask for one thread before NumPy loads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placement.errors import InputError
    from placement.simulator.engine import simulate
    from placement.simulator.results.report import JobReport, Report, SimulationReport
    from placement.simulator.world import Placed

_HOMES = {
    "InputError": "placement.errors",
    "JobReport": "placement.simulator.results.report",
    "Placed": "placement.simulator.world",
    "Report": "placement.simulator.results.report",
    "SimulationReport": "placement.simulator.results.report",
    "simulate": "placement.simulator.engine",
}

__all__ = ["InputError", "JobReport", "Placed", "Report", "SimulationReport", "simulate"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
