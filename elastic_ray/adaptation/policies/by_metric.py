"""Policies that react to a metric in the train function's reports (pure)."""

from __future__ import annotations

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import ScaleRate, Stop
from elastic_ray.adaptation.view import PolicyView
from placement.text import count


class _ByMetric(ReadyPolicy):
    """Base class of policies that track a metric's best value; each report counts once."""

    def __init__(self, metric: str, *, mode: str) -> None:
        if not isinstance(metric, str) or not metric:
            raise TypeError(f"{type(self).__name__}(metric) must be the name of a metric, but got {metric!r}")
        self.watches = (metric,)
        self.metric, self.mode = metric, self._one_of("mode", mode, ("min", "max"))
        self.best: float | None = None
        self.seen = self.bad = 0

    def _reported(self, view: PolicyView) -> float | None:
        """Return the metric's value if there is a new report, otherwise None."""
        new, self.seen = view.reports > self.seen, view.reports
        return view.metrics.get(self.metric) if new else None

    def _improves(self, value: float, best: float, margin: float) -> bool:
        """True if `value` is better than `best` by more than ``margin``."""
        return value < best - margin if self.mode == "min" else value > best + margin


class EarlyStop(_ByMetric):
    """Policy that ends the training when a metric has stopped improving.

    Args:
        metric: name of the metric, as passed to ``elastic_ray.report``.
        patience: number of consecutive reports without improvement before training ends, 1 or more.
        min_delta: amount that a change must exceed to count as an improvement, 0 or more.
        mode: ``"min"`` if smaller values are better, ``"max"`` if larger values are better.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Examples:
        >>> from elastic_ray.adaptation import EarlyStop
        >>> EarlyStop("accuracy", mode="max", patience=5).patience
        5
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "min",
    ) -> None:
        super().__init__(metric, mode=mode)
        self.patience = self._whole("patience", patience, least=1)
        self.min_delta = self._number("min_delta", min_delta, least=0.0)

    def after_step(self, view: PolicyView) -> Answer:
        value = self._reported(view)
        if value is None:
            return None
        if self.best is None or self._improves(value, self.best, self.min_delta):
            self.best, self.bad = value, 0
            return None
        self.bad += 1
        if self.bad < self.patience:
            return None
        return Stop(f"{self.metric} has not been better than {self.best:g} in the last {count(self.bad, 'report')}")


class LossPlateau(_ByMetric):
    """Policy that lowers the learning rates when a metric stops improving, like torch's ``ReduceLROnPlateau``.

    Args:
        metric: name of the metric, as passed to ``elastic_ray.report``.
        factor: factor that multiplies the rates, above 0 and below 1.
        patience: number of reports without improvement to tolerate, 0 or more.
        threshold: smallest change that counts as an improvement, 0 or more.
        threshold_mode: ``"rel"`` (a fraction of the best value) or ``"abs"``.
        cooldown: number of reports to ignore after a reduction, 0 or more.
        min_factor: lower bound on the combined reduction factor, 0 or more and below 1; replaces torch's ``min_lr``.
        mode: ``"min"`` if smaller values are better, ``"max"`` if larger values are better.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Examples:
        >>> from elastic_ray.adaptation import LossPlateau
        >>> LossPlateau(factor=0.5, patience=3).factor
        0.5
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_factor: float = 0.0,
        mode: str = "min",
    ) -> None:
        super().__init__(metric, mode=mode)
        self.factor = self._number("factor", factor, above=0.0, below=1.0)
        self.patience = self._whole("patience", patience, least=0)
        self.threshold = self._number("threshold", threshold, least=0.0)
        self.threshold_mode = self._one_of("threshold_mode", threshold_mode, ("rel", "abs"))
        self.cooldown = self._whole("cooldown", cooldown, least=0)
        self.min_factor = self._number("min_factor", min_factor, least=0.0, below=1.0)
        self.reduced, self.cooling = 1.0, 0

    def after_step(self, view: PolicyView) -> Answer:
        value = self._reported(view)
        if value is None:
            return None
        relative = self.threshold_mode == "rel" and self.best is not None
        margin = self.threshold * (self.best if relative and self.best is not None else 1.0)
        if self.best is None or self._improves(value, self.best, margin):
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        if self.cooling:
            self.cooling, self.bad = self.cooling - 1, 0
        if self.bad <= self.patience:
            return None
        self.cooling, self.bad = self.cooldown, 0
        before, self.reduced = self.reduced, max(self.min_factor, self.reduced * self.factor)
        return ScaleRate(self.reduced / before) if self.reduced < before else None
