"""Policy that limits the cost of a run (pure)."""

from __future__ import annotations

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import Request, Resize, Stop
from elastic_ray.adaptation.view import PolicyView

_STEPS_UNTIL_STOP = 2  # a request rides on the next step, which comes before it is applied


class CostCap(ReadyPolicy):
    """Policy that ends the training before its cost, price * ``view.worker_s``, exceeds a limit.

    The cost is counted from the run's first step and excludes the time workers need to start.

    Args:
        usd: the limit [USD], above 0.
        price_per_worker_hour: price of one worker [USD per hour], above 0.
        shrink_at: fraction of the limit that makes the policy request fewer workers, above 0 and below 1; None disables
            this. With fewer workers, training is slower, but most jobs train more samples per worker-hour.
        shrink_to: number of workers to request at ``shrink_at``.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Examples:
        >>> from elastic_ray.adaptation import CostCap
        >>> CostCap(20.0, price_per_worker_hour=2.5).usd
        20.0
    """

    def __init__(
        self,
        usd: float,
        *,
        price_per_worker_hour: float,
        shrink_at: float | None = None,
        shrink_to: int = 1,
    ) -> None:
        self.usd = self._number("usd", usd, above=0.0)
        self.price = self._number("price_per_worker_hour", price_per_worker_hour, above=0.0)
        self.shrink_at = None if shrink_at is None else self._number("shrink_at", shrink_at, above=0.0, below=1.0)
        self.shrink_to = self._whole("shrink_to", shrink_to, least=1)
        self.shrunk = False

    def after_step(self, view: PolicyView) -> Answer:
        """Return a request to stop at the cost limit, or to shrink at its fraction ``shrink_at``; otherwise None."""
        asked: list[Request] = []
        spent = self.price * view.worker_s / 3600
        coming = self.price * _STEPS_UNTIL_STOP * view.step_s * view.workers / 3600
        if spent + coming >= self.usd:
            asked.append(Stop(f"{spent:.4g} USD are spent, and {self.usd:g} USD are the cap"))
        elif self.shrink_at is not None and not self.shrunk and spent >= self.shrink_at * self.usd:
            self.shrunk = True
            if view.workers > self.shrink_to:
                asked.append(Resize(to=self.shrink_to))
        return asked
