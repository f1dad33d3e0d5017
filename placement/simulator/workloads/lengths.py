"""True lengths of jobs, and the lengths they declare."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping

from placement.checks import check_number
from placement.errors import InputError
from placement.simulator.workloads.profiles import Application


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """True and declared job lengths of a trace; by default all jobs of an application are equally long."""

    # whether jobs declare how many epochs they run. (The oracle of jobs that run as requested, which Optimus was
    # published with, is not touched.)
    declared: bool = True
    error: float = 0.0  # standard deviation of the logarithm of declared over true epochs, drawn once a job
    spread: float = 0.0  # standard deviation of the logarithm of true over profiled epochs, drawn once a job
    # true epochs by job, where they are known; ``spread`` does not touch these
    epochs: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in ("error", "spread"):
            check_number(f"{field} of lengths", getattr(self, field), least=0, finite=True, error=InputError)
        for job, epochs in self.epochs.items():
            check_number(f"epochs of job {job!r}", epochs, least=1, error=InputError)

    def application(self, application: Application, job: str, seed: int) -> Application:
        """Return the job's application, stretched or shortened to the job's true number of epochs."""
        if job in self.epochs:
            return application.stretched(self.epochs[job])
        if not self.spread:
            return application
        factor = math.exp(random.Random(f"{seed}/length/{job}").gauss(0.0, self.spread))
        return application.stretched(max(1, round(application.epochs * factor)))

    def declaration(self, epochs: int, job: str, seed: int) -> float | None:
        """Return the number of epochs that the job declares; None if it declares none."""
        if not self.declared:
            return None
        if not self.error:
            return float(epochs)
        return epochs * math.exp(random.Random(f"{seed}/declared/{job}").gauss(0.0, self.error))
