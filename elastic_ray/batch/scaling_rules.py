"""Learning-rate rules: the factor on the rate when the batch is ``scale`` times the initial one.

A rule is a pure value: it gets the scale, the noise of each parameter group and the progress, and returns one
factor per group. The optimizer wrapper multiplies by it inside ``optimizer.step`` and restores the rate
afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from placement.goodput.model import NoiseScale


@runtime_checkable
class ScalingRule(Protocol):
    """Protocol of a learning-rate rule, called by the optimizer wrapper before each step. Users may bring their own."""

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        """Return a finite factor of at least 0 for each parameter group.

        Args:
            scale: global batch M / initial batch M0, above 0; below 1 where memory forces a smaller batch.
            noise: noise scale of each parameter group, None where there is no estimate yet.
            progress: epochs of data trained on so far, fractions included.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaScale:
    """The gain: one step at the larger batch does the work of that many small ones. For SGD (with momentum).

        factor = (var + sqr) / (var / scale + sqr)        between 1 (no noise) and scale (nothing but noise)

    The factor is min(1, scale) while a group has no estimate. Source: Johnson et al., AdaScale SGD (ICML
    2020), algorithm 1.
    """

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        return tuple(step_gain(scale, group) for group in noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamScale:
    """The square root of the gain, on preconditioned statistics. For Adam and its kin.

        factor = ((var + sqr) / (var / scale + sqr))^power,  power = 1/2

    Adam's step is already divided by the gradient's size, so noise enters it with its root. Source: AdaptDL's
    AdamScale (Pollux, OSDI 2021); Malladi et al. 2022 for the square root.
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.power <= 1:
            raise ValueError(f"power must be above 0 and at most 1, but got {self.power}")

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        return tuple(step_gain(scale, group) ** self.power for group in noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """For Adam and its kin: the rate as :class:`AdamScale`, and second moments, eps and weight decay that follow.

    ``adam_options`` has what follows, with sources.
    """

    by_noise: bool = True  # the rate's factor is the square root of the gain; else that of the scale, as :class:`Sqrt`

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        rule = AdamScale() if self.by_noise else Sqrt()
        return rule.factors(scale, noise, progress)


def adam_options(group: Mapping[str, Any], scale: float, factor: float, correction: float) -> dict[str, Any]:
    """Return the options of a parameter group of Adam's for a batch of ``scale`` x the initial one, but the rate.

        beta2'        = beta2^scale                  the second moment's half-life is the same in samples
        eps'          = eps / sqrt(scale) x c        as the noise in the gradient, which it stands beside
        weight_decay' = weight_decay x scale / (factor x c)      its half-life lr x weight_decay likewise

    The last holds where weight decay is decoupled (AdamW); as a part of the loss it stays. beta1 stays. Sources: Marek
    et al. 2025 (arXiv 2507.07101) for beta2 and beta1; Malladi et al. 2022 (arXiv 2205.10287), definition 5.2, for
    eps; Wang and Aitchison 2024 (arXiv 2405.13698) for weight decay.

    Args:
        group: the user's options, those at the initial batch.
        scale: global / initial batch size.
        correction: c, by which the learning rate is multiplied as well, see :func:`bias_correction`.
    """
    beta1, beta2 = group["betas"]
    found: dict[str, Any] = {"betas": (beta1, beta2**scale)}
    if isinstance(group.get("eps"), int | float):
        found["eps"] = group["eps"] / math.sqrt(scale) * correction
    if group.get("decoupled_weight_decay") and factor > 0:
        found["weight_decay"] = group["weight_decay"] * scale / (factor * correction)
    return found


def bias_correction(beta2: float, steps: float, initial_steps: float, scale: float) -> float:
    """Return c, with which Adam's correction of the second moment's bias holds for batches that have changed.

        c = sqrt((1 - beta2^s) / (1 - beta2^(scale x t)))

    Adam divides the second moment by 1 - beta2'^t with the present beta2' = beta2^scale, as if all t steps had had it.
    They have decayed by beta2^s. A rate and an eps of c times their value make the exact update.

    Args:
        steps: t >= 1, the present one included.
        initial_steps: s > 0, the sum of their scales.
    """
    return math.sqrt(-math.expm1(initial_steps * math.log(beta2)) / -math.expm1(scale * steps * math.log(beta2)))


def remembered(held: float, beta2: float, initial_steps: float, scale: float, factor: float) -> float:
    """Return the mean of 1 / factor^2 over the steps that the second moment v remembers, with its weights.

    A rule's factor is sqrt(v(1) / v) for the v that gradients of its batch come to have. Right after a growth v is
    still that of smaller batches, v(1) x held, so that a rate of factor x sqrt(held) times its value makes the step
    that the rule means; once v has caught up this is 1.

    Args:
        held: before this step; 1 at first.
        initial_steps: as of :func:`bias_correction`, this step included.
    """
    kept = math.exp(scale * math.log(beta2))
    weight = -math.expm1(initial_steps * math.log(beta2))
    return ((weight - (1.0 - kept)) * held + (1.0 - kept) / factor**2) / weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """factor = scale. Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD"."""

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        return (_checked(scale),) * len(noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sqrt:
    """factor = sqrt(scale): keeps the variance of a step. Source: Krizhevsky 2014; Hoffer et al. 2017."""

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        return (math.sqrt(_checked(scale)),) * len(noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Legw:
    """Square root with linear-epoch gradual warm-up: the warm-up grows with the batch.

        factor = sqrt(scale) x min(1, progress / (warmup_epochs x scale))

    The factor is 0 at progress 0, and a batch that grows during the warm-up lengthens what is left of it.
    Source: You et al. 2019, "Large-Batch Training for LSTM and Beyond".
    """

    warmup_epochs: float = 1.0  # warm-up at the initial batch, in epochs; 0 = none

    def __post_init__(self) -> None:
        if not (self.warmup_epochs >= 0 and math.isfinite(self.warmup_epochs)):
            raise ValueError(f"warmup_epochs must be 0 or more epochs, but got {self.warmup_epochs}")

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        warmup = self.warmup_epochs * _checked(scale)
        warmed = 1.0 if progress >= warmup else max(progress, 0.0) / warmup
        return (math.sqrt(scale) * warmed,) * len(noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unscaled:
    """factor = 1: the rate is left to the user."""

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        return (1.0,) * len(noise)


RULES: dict[str, Callable[[], ScalingRule]] = {
    "adascale": AdaScale,
    "adamscale": AdamScale,
    "adam": Adam,
    "linear": Linear,
    "sqrt": Sqrt,
    "legw": Legw,
    "none": Unscaled,
}
"""Every rule by the name that users give it; tests run over all of them."""


GROWTH_A_STEP = 2.0 ** (1 / 8)
"""By what a factor that follows the noise grows at most from one step to the next: it doubles in 8 steps."""


def held_back(factors: Sequence[float], held: Sequence[float]) -> tuple[float, ...]:
    """Return factors that are no larger than those of the step before allow; they may fall at once.

    A larger batch, or a noise that rose in one estimate, changes the factor at once. What the gradients then are shows
    only after some steps, and a rate that was too large for as many has destroyed the run by then.

    Args:
        factors: what a rule wants, one for each parameter group.
        held: of the step before, likewise; empty for none.

    Example:
        >>> [round(factor, 3) for factor in held_back((4.0, 0.5), (1.0, 1.0))]
        [1.091, 0.5]
    """
    known = held if len(held) == len(factors) else (1.0,) * len(factors)
    return tuple(min(new, max(old, 1.0) * GROWTH_A_STEP) for new, old in zip(factors, known, strict=True))


def by_name(name: str) -> ScalingRule:
    """Return the rule of that name, with its default options.

    Raises ValueError: no such rule; the message lists those there are.
    """
    if name not in RULES:
        raise ValueError(f"learning-rate rule must be one of {', '.join(sorted(RULES))}, but got {name!r}")
    return RULES[name]()


def default_rule(*, adam_like: bool) -> ScalingRule:
    """Return AdamScale for optimizers that divide by the gradient's size, AdaScale for the rest."""
    return AdamScale() if adam_like else AdaScale()


def resolve(rule: ScalingRule | str | None, *, adam_like: bool) -> ScalingRule:
    """Return the rule a user means by a name, an object of their own, or nothing."""
    if rule is None:
        return default_rule(adam_like=adam_like)
    if isinstance(rule, str):
        return by_name(rule)
    if isinstance(rule, type) or not isinstance(rule, ScalingRule):
        raise TypeError(
            "learning-rate rule must be a name or an object with factors(scale, noise, progress), "
            f"but got {rule!r}; names: {', '.join(sorted(RULES))}"
        )
    return rule


def step_gain(scale: float, noise: NoiseScale | None) -> float:
    """Return scale-invariant progress of one step: the number of steps at the initial batch that it is worth.

    r_t = (var + sqr) / (var / scale + sqr), on the whole model's noise; AdaScale adds these up and ends, or
    steps a schedule, at a given sum. min(1, scale), the least that it can be, while there is no estimate.
    Source: AdaScale SGD (ICML 2020), section 4.
    """
    _checked(scale)
    return min(1.0, scale) if noise is None else float(noise.gain(scale))


def _checked(scale: float) -> float:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be batch size / initial batch size, above 0, but got {scale}")
    return scale
