"""Cost of the cluster over time; a separate module, so that other processes need not import the objectives."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Cost of all nodes and number of jobs, both with exponentially decaying memory."""

    hours: float = 0.0  # that are counted [h]
    spent_usd: float = 0.0  # for nodes in that time [USD]
    job_hours: float = 0.0  # number of jobs x hours

    def after(self, hours: float, usd_per_h: float, jobs: int, memory_h: float) -> Account:
        """Return the account after `hours` more at this price; hours that lie ``memory_h`` in the past count 1/e."""
        kept = math.exp(-hours / memory_h)
        fresh = -memory_h * math.expm1(-hours / memory_h)  # not 1 - kept, which has no digits after a short while
        return Account(
            hours=self.hours * kept + fresh,
            spent_usd=self.spent_usd * kept + usd_per_h * fresh,
            job_hours=self.job_hours * kept + jobs * fresh,
        )
