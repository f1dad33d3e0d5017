"""Discrete-event simulation of a cluster, driven by a trace and measured profiles, with the real allocator core.

    from placement.simulator import simulate
    report = simulate("workload-6.csv", "profiles", "aws:16x4", rules="pollux", policy="tiresias")
    report.avg_jct_s

The simulator has no policy of its own: it drives ``placement.allocator.core.AllocatorCore``, which is also used live.
Names are imported on first use, so that ``python -m placement.simulator`` can limit NumPy to one thread beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from placement.errors import InputError
    from placement.simulator.engine import simulate
    from placement.simulator.results.report import JobReport, SimulationReport
    from placement.simulator.world.state import Placed

_HOMES = {
    "placement.errors": "InputError",
    "placement.simulator.engine": "simulate",
    "placement.simulator.results.report": "JobReport SimulationReport",
    "placement.simulator.world.state": "Placed",
}

__all__ = ["InputError", "JobReport", "Placed", "SimulationReport", "simulate"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
