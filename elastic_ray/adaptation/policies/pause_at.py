"""A pause after a given step (pure)."""

from __future__ import annotations

from elastic_ray.adaptation.policy import Policy
from elastic_ray.adaptation.requests import Pause
from elastic_ray.adaptation.view import PolicyView


class PauseAt(Policy):
    """Save the job after a given step and give its slots back, so that its state there can be looked at."""

    def __init__(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise ValueError(f"step must be a whole number from 1, but got {step!r}")
        self.step = step  # number of committed steps

    def before_step(self, view: PolicyView) -> Pause | None:
        """Ask with the step before, for a request holds after the step that it rides on."""
        return Pause(f"step {self.step} is reached") if view.step == self.step - 1 else None
