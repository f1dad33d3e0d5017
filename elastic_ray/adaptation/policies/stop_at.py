"""Policy that ends the training at a given step (pure)."""

from __future__ import annotations

from elastic_ray.adaptation.policy import Policy
from elastic_ray.adaptation.requests import Stop
from elastic_ray.adaptation.view import PolicyView
from placement.checks import check_whole


class StopAt(Policy):
    """Policy that ends the training after ``step`` committed steps, so that the last stored state is from that step."""

    def __init__(self, step: int) -> None:
        check_whole("step", step, least=1)
        self.step = step  # number of committed steps

    def before_step(self, view: PolicyView) -> Stop | None:
        """Return a stop request before the last step; the request takes effect once that step is committed."""
        return Stop(f"step {self.step} is reached") if view.step == self.step - 1 else None
