"""A model's learning-rate schedulers: they travel, a lost step takes them back, and none may be left out (torch)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_ray.batch.scaling_rules import AdamScale, AdaScale, Linear, ScalingRule, Sqrt, Unscaled, held_back, resolve
from elastic_ray.batch.statistics import is_adam_like
from elastic_ray.parallel.patches import count_optimizer_steps
from elastic_ray.run.registry import HookPoint
from elastic_ray.state.tree import DictState
from placement.goodput.model import NoiseScale

if TYPE_CHECKING:
    from elastic_ray.adaptation.runner import PolicyRunner
    from elastic_ray.run.run import Run

_PASS_IT = (
    "make it before the model is wrapped, and pass it as AdaptiveDataParallel(model, optimizer, lr_scheduler=...), "
    "accelerator.prepare(..., scheduler) or fabric.setup(model, optimizer, scheduler=...)"
)


class Schedulers:
    """Schedulers of one model's optimizer.

    Args:
        optimizer: the model's.
        name: tells the optimizer apart from others of the run.
        given: those that were passed.
        schedule: what those count that step with every batch.
    """

    def __init__(
        self, run: Run, optimizer: torch.optim.Optimizer, name: str, given: Sequence[Any], schedule: str
    ) -> None:
        self._run, self._optimizer = run, optimizer
        self._known = list(given)
        for number, scheduler in enumerate(self._known):
            count_optimizer_steps(scheduler, run.ledger, schedule)
            key = f"lr_scheduler/{name}/{number}"
            run.states.register(key, DictState(scheduler))
            run.states.register_rollback(scheduler.state_dict, scheduler.load_state_dict, key)
        if self._known:
            run.states.register_rollback(self._rates, self._set_rates, f"learning rates/{name}")
        self._rates_were_loaded = False
        optimizer.register_load_state_dict_pre_hook(self._look_at_loaded)
        run.registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, self._check)

    def _look_at_loaded(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Remember that a loaded state may tell of a scheduler that was there when it was saved."""
        self._rates_were_loaded |= not self._has_initial_rates()

    def _has_initial_rates(self) -> bool:
        return any("initial_lr" in group for group in self._optimizer.param_groups)

    def _check(self) -> None:
        """Refuse a scheduler that is not known. Raises ValueError: there is one."""
        unknown = not self._known and not self._rates_were_loaded and self._has_initial_rates()
        known = [id(each) for scheduler in self._known for each in _with_inner(scheduler)]
        strangers, made = self._strangers(known)
        if strangers:
            gc.collect()  # one that was thrown away may be held by itself
            strangers, made = self._strangers(known)
        if strangers or (unknown and not made):
            which = f" ({', '.join(strangers)})" if strangers else ""
            raise ValueError(
                f"the optimizer has a learning-rate scheduler{which} that AdaptiveDataParallel does not know, so "
                f"workers who join later would miss its state: {_PASS_IT}"
            )

    def _strangers(self, known: Sequence[int]) -> tuple[list[str], bool]:
        """Names of schedulers that no state of the run holds, and whether any was made; in a job alone."""
        made = self._run.optimizers.schedulers_of(self._optimizer) if self._run.elastic else ()
        strange = [each for each in made if id(each) not in known and not self._run.states.holds(each)]
        return [type(each).__name__ for each in strange], bool(made)

    def _rates(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]

    def _set_rates(self, rates: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, rates, strict=True):
            group.update(values)


def _with_inner(scheduler: Any) -> list[Any]:
    """A scheduler, and those that it holds: ``SequentialLR``, ``ChainedScheduler``, warm-ups and wrappers of others."""
    found, seen, waiting = list[Any](), set[int](), [scheduler]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (list, tuple)):
            waiting.extend(each)
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, LRScheduler) or each is scheduler:
            found.append(each)
            waiting.extend(getattr(each, "__dict__", {}).values())
    return found


# Rules whose factors are 1 at scale 1 and do not move with the progress.
_BY_SCALE_AND_NOISE = (AdaScale, AdamScale, Linear, Sqrt, Unscaled)


class LearningRates:
    """Learning rates of one optimizer, scaled by a rule around each step.

    Args:
        optimizer: whose rates user code and schedulers set.
        rule: as of ``AdaptiveDataParallel(scaling_rule=...)``.
        noise: gives the noise of each parameter group, as far as it is known.
        epochs_done: epochs of data trained on.
        policies: what they multiply all rates by.
        held: factors of the step before where they follow the noise, which all ranks share; changed in place.

    Attributes:
        factor: what the latest step has multiplied them by; the mean over the parameter groups.

    Raises TypeError, ValueError: there is no such rule.
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
        """Name of the setting that requires gradient statistics, or ""."""
        asked = not self._by_default and isinstance(self._rule, (AdaScale, AdamScale))
        return f"scaling_rule {type(self._rule).__name__}" if asked else ""

    def scale(self, scale: float, *, has_statistics: bool) -> list[float] | None:
        """Set rates for a batch of ``scale`` x the initial one.

        Args:
            scale: global / initial batch size.
            has_statistics: whether the strategy gives gradient statistics, without which no rule holds by default.

        Returns the rates before, for :meth:`restore`; None where they are as they were.
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
        """Restore the rates set by user code and schedulers, after the optimizer's step."""
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _rule_factors(self, scale: float) -> Sequence[float]:
        noise, progress = self._noise(), self._epochs_done()
        # Rules of one's own and warm-ups may look at the progress, which moves with every step.
        asked = (scale, noise, None if not self._warms else progress)
        if self._factors is None or self._factors[0] != asked:
            self._factors = asked, self._rule.factors(scale, noise, progress)
        return self._factors[1]
