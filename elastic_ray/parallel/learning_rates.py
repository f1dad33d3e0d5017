"""Learning rates of one optimizer for the present batch size, while it steps (torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.batch.scaling_rules import AdamScale, AdaScale, Linear, ScalingRule, Sqrt, Unscaled, held_back, resolve
from elastic_ray.batch.statistics import is_adam_like
from placement.goodput.model import NoiseScale

if TYPE_CHECKING:
    from elastic_ray.adaptation.runner import PolicyRunner

# Rules whose factors are 1 at scale 1 and do not move with the progress.
_BY_SCALE_AND_NOISE = (AdaScale, AdamScale, Linear, Sqrt, Unscaled)


class LearningRates:
    """See the module's text.

    Args:
        optimizer: whose rates user code and schedulers set.
        rule: as of ``AdaptiveDataParallel(scaling_rule=...)``.
        noise: gives the noise of each parameter group, as far as it is known.
        epochs_done: epochs of data trained on.
        policies: what they multiply all rates by.
        held: factors of the step before where they follow the noise, which all ranks share; changed in place.

    Attributes:
        factor: what the latest step has multiplied them by; the mean over the parameter groups.

    Raises:
        TypeError, ValueError: there is no such rule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: ScalingRule | str | None,
        *,
        noise: Callable[[], Sequence[NoiseScale | None]],
        epochs_done: Callable[[], float],
        policies: PolicyRunner,
        held: list[float],
    ) -> None:
        self._optimizer = optimizer
        self._rule = resolve(rule, adam_like=is_adam_like(optimizer))
        self._by_default = rule is None
        self._warms = not isinstance(self._rule, _BY_SCALE_AND_NOISE)
        self._noise = noise
        self._epochs_done = epochs_done
        self._policies = policies
        self._held = held
        self._factors: tuple[tuple[Any, ...], tuple[float, ...]] | None = None
        self.factor = 1.0

    @property
    def wants_statistics(self) -> str:
        """What of the user's needs gradient statistics; empty for nothing."""
        asked = not self._by_default and isinstance(self._rule, (AdaScale, AdamScale))
        return f"scaling_rule {type(self._rule).__name__}" if asked else ""

    def scale(self, scale: float, *, has_statistics: bool) -> list[float] | None:
        """Set rates for a batch of ``scale`` x the initial one.

        Args:
            scale: global / initial batch size.
            has_statistics: whether the strategy gives gradient statistics, without which no rule holds by default.

        Returns:
            The rates before, for :meth:`restore`; None where they are as they were.
        """
        as_it_is = (scale == 1.0 and not self._warms) or (self._by_default and not has_statistics)
        by_policy = self._policies.values.rate_factor
        if as_it_is and by_policy == 1.0:
            self._held[:] = ()
            self.factor = 1.0
            return None
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        factors: Sequence[float] = [1.0] * len(groups) if as_it_is else self._rule_factors(scale)
        if isinstance(self._rule, (AdaScale, AdamScale)):
            factors = held_back(factors, self._held)
            self._held[:] = factors
        self.factor = by_policy * sum(factors) / max(1, len(factors))
        try:
            for group, rate, factor in zip(groups, rates, factors, strict=True):
                group["lr"] = rate * factor * by_policy
        except ValueError:  # a rule of the user's has given too few or too many
            self.restore(rates)
            raise
        return rates

    def restore(self, rates: Sequence[float]) -> None:
        """The optimizer has stepped: have the rates that user code and schedulers have set."""
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _rule_factors(self, scale: float) -> Sequence[float]:
        noise, progress = self._noise(), self._epochs_done()
        # Rules of one's own and warm-ups may look at the progress, which moves with every step.
        asked = (scale, noise, None if not self._warms else progress)
        if self._factors is None or self._factors[0] != asked:
            self._factors = asked, self._rule.factors(scale, noise, progress)
        return self._factors[1]
