"""Learning-rate scaling rules: factors on the learning rate for a batch ``scale`` times the initial batch.

A rule is a pure value. From the scale, the noise of each parameter group and the progress, it computes one factor per
group. The optimizer wrapper multiplies the rate by the factor inside ``optimizer.step`` and restores it afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from placement.goodput.model import NoiseScale


@runtime_checkable
class ScalingRule(Protocol):
    """Protocol of a learning-rate scaling rule, called before each optimizer step; users may write their own."""

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        """Return one finite factor, 0 or more, for each parameter group.

        Args:
            scale: Global batch M / initial batch M0, above 0; below 1 if memory forces a smaller batch.
            noise: Noise scale of each parameter group; None before its first estimate.
            progress: Epochs of data trained on so far, including fractions.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaScale:
    """Learning-rate rule for SGD (with momentum): the gain, the number of small steps that one large step replaces.

        factor = (var + sqr) / (var / scale + sqr)        between 1 (no noise) and scale (nothing but noise)

    The factor is min(1, scale) while a group has no estimate. Source: Johnson et al., AdaScale SGD (ICML
    2020), algorithm 1.
    """

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        return tuple(step_gain(scale, group) for group in noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamScale:
    """Learning-rate rule for Adam and similar optimizers: square root of the gain, on preconditioned statistics.

        factor = ((var + sqr) / (var / scale + sqr))^power,  power = 1/2

    Adam's step is already divided by the gradient's size, so noise affects it by its square root. Source: AdaptDL's
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
    """Rule for Adam and similar optimizers: the rate of :class:`AdamScale`, and scaled betas, eps and weight decay.

    See :func:`adam_options` for the formulas and their sources.
    """

    by_noise: bool = True  # the rate's factor is the square root of the gain; else that of the scale, as :class:`Sqrt`
    least_beta2: float = 0.0  # a larger batch reduces beta2 to this at most; Seesaw: ``LEAST_BETA2``

    def __post_init__(self) -> None:
        if not 0 <= self.least_beta2 < 1:
            raise ValueError(f"least_beta2 must be 0 or more and below 1, but got {self.least_beta2}")

    def memory_scale(self, beta2: float, scale: float) -> float:
        """Return the exponent e of beta2' = beta2^e: ``scale``, lowered so that beta2' >= min(beta2, least_beta2)."""
        if scale <= 1 or not self.least_beta2:
            return scale
        return min(scale, max(1.0, math.log(self.least_beta2) / math.log(beta2)))

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        rule = AdamScale() if self.by_noise else Sqrt()
        return rule.factors(scale, noise, progress)


LEAST_BETA2 = 0.95
"""What large batches are trained with: v is then the mean of some 20 gradients, and of fewer it is too noisy."""


def adam_options(
    group: Mapping[str, Any], scale: float, factor: float, correction: float, memory: float
) -> dict[str, Any]:
    """Return the options, except the rate, of an Adam parameter group for a batch of ``scale`` x the initial one.

        beta1', beta2' = beta1^scale, beta2^memory     with memory = scale, half-lives are the same in samples
        eps'          = eps / sqrt(scale) x c        scales like the gradient noise, to which it is added
        weight_decay' = weight_decay x scale / (factor x c)      its half-life lr x weight_decay is the same in samples

    The last line applies to decoupled weight decay (AdamW). Weight decay that is part of the loss is unchanged.
    Sources: Marek et al. 2025 (arXiv 2507.07101) for beta2; Malladi et al. 2022 (arXiv 2205.10287), definition 5.2, for
    beta1 and eps; Wang and Aitchison 2024 (arXiv 2405.13698) for weight decay.

    Args:
        correction: c, which also multiplies the learning rate; see :func:`bias_correction`.
        memory: e of :meth:`Adam.memory_scale`.
    """
    beta1, beta2 = group["betas"]
    found: dict[str, Any] = {"betas": (beta1**scale, beta2**memory)}
    if isinstance(group.get("eps"), int | float):
        found["eps"] = group["eps"] / math.sqrt(scale) * correction
    if group.get("decoupled_weight_decay") and factor > 0:
        found["weight_decay"] = group["weight_decay"] * scale / (factor * correction)
    return found


def bias_correction(beta: float, steps: float, initial_steps: float, scale: float) -> float:
    """Return c, which keeps Adam's bias correction of a moment exact after batch changes.

        c = (1 - beta^s) / (1 - beta^(scale x t))

    Adam divides the moment by 1 - beta'^t with the current beta' = beta^scale, as if all t steps had used it. In fact
    they have decayed by beta^s. Dividing the rate by the first moment's c, and multiplying the rate and eps by the root
    of the second moment's c, makes the update exact.

    Args:
        steps: t >= 1, including the current step.
        initial_steps: s > 0, the sum of the steps' scales.
    """
    if beta == 0.0:
        return 1.0
    return math.expm1(initial_steps * math.log(beta)) / math.expm1(scale * steps * math.log(beta))


def remembered(held: float, beta2: float, initial_steps: float, scale: float, factor: float) -> float:
    """Return the mean of 1 / factor^2 over the steps in Adam's second moment v, weighted as in v.

    A rule's factor is sqrt(v(1) / v) for the v that gradients of its batch converge to. Right after a growth, v still
    has its value for smaller batches, v(1) x held, so that the rule's rate times factor x sqrt(held) makes the step the
    rule intends. Once v has caught up, factor x sqrt(held) is 1.

    Args:
        held: The value returned for the previous step; 1 at first.
        initial_steps: As in :func:`bias_correction`, including this step.
    """
    kept = math.exp(scale * math.log(beta2))
    weight = -math.expm1(initial_steps * math.log(beta2))
    return ((weight - (1.0 - kept)) * held + (1.0 - kept) / factor**2) / weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Linear learning-rate rule: factor = scale. Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD"."""

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        return (scale,) * len(noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sqrt:
    """Learning-rate rule factor = sqrt(scale), which keeps a step's variance (Krizhevsky 2014; Hoffer et al. 2017)."""

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        return (math.sqrt(scale),) * len(noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Legw:
    """Square-root rule with linear-epoch gradual warm-up: the warm-up grows with the batch.

        factor = sqrt(scale) x min(1, progress / (warmup_epochs x scale))

    The factor is 0 at progress 0. If the batch grows during the warm-up, the rest of the warm-up becomes longer.
    Source: You et al. 2019, "Large-Batch Training for LSTM and Beyond".
    """

    warmup_epochs: float = 1.0  # warm-up at the initial batch, in epochs; 0 = none

    def __post_init__(self) -> None:
        if not (self.warmup_epochs >= 0 and math.isfinite(self.warmup_epochs)):
            raise ValueError(f"warmup_epochs must be 0 or more epochs, but got {self.warmup_epochs}")

    def factors(self, scale: float, noise: Sequence[NoiseScale | None], progress: float) -> tuple[float, ...]:
        warmup = self.warmup_epochs * scale
        warmed = 1.0 if progress >= warmup else max(progress, 0.0) / warmup
        return (math.sqrt(scale) * warmed,) * len(noise)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unscaled:
    """Learning-rate rule factor = 1: the user sets the rate for every batch size."""

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
    """Return the factors with their growth limited to 2^(1/8) per step; they may fall freely.

    Each is at most 2^(1/8) times its previous value, or times 1 if that is larger. A larger batch, or a noise estimate
    that jumps, changes the factor at once. Its effect on the gradients shows only after several steps, and by then a
    rate that is too large has ruined the run.

    Example:
        >>> [round(factor, 3) for factor in held_back((4.0, 0.5), (1.0, 1.0))]
        [1.091, 0.5]
    """
    known = held if len(held) == len(factors) else (1.0,) * len(factors)
    return tuple(min(new, max(old, 1.0) * GROWTH_A_STEP) for new, old in zip(factors, known, strict=True))


def resolve(rule: ScalingRule | str | None, *, adam_like: bool) -> ScalingRule:
    """Return the rule given as an object or by name.

    None stands for AdamScale if ``adam_like`` (the optimizer divides by the gradient's size), else for AdaScale.
    """
    if rule is None:
        return AdamScale() if adam_like else AdaScale()
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"learning-rate rule must be one of {', '.join(sorted(RULES))}, but got {rule!r}")
        return RULES[rule]()
    if isinstance(rule, type) or not isinstance(rule, ScalingRule):
        raise TypeError(
            "learning-rate rule must be a name or an object with factors(scale, noise, progress), "
            f"but got {rule!r}; names: {', '.join(sorted(RULES))}"
        )
    return rule


def step_gain(scale: float, noise: NoiseScale | None) -> float:
    """Return one step's scale-invariant progress: the equivalent number of steps at the initial batch.

    r_t = (var + sqr) / (var / scale + sqr), for the noise of the entire model. AdaScale sums these values, and ends or
    steps a schedule at a given sum. Without an estimate, return min(1, scale), the smallest possible value. Source:
    AdaScale SGD (ICML 2020), section 4.
    """
    return min(1.0, scale) if noise is None else float(noise.gain(scale))
