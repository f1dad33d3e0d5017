"""A model's learning-rate schedulers: sent to joining workers, and rolled back with lost steps (torch)."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ray.adaptation.policies.seesaw import Seesaw
from elastic_ray.adaptation.policy import Policy
from elastic_ray.batch.scaling_rules import (
    LEAST_BETA2,
    Adam,
    AdamScale,
    AdaScale,
    Linear,
    ScalingRule,
    Sqrt,
    Unscaled,
    adam_options,
    bias_correction,
    held_back,
    remembered,
    resolve,
)
from elastic_ray.parallel.patches import SEESAW, count_optimizer_steps
from elastic_ray.run.registry import HookPoint
from elastic_ray.state.tree import DictState
from elastic_ray.sync.preconditioners import is_adam_like
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
        schedule: Unit for schedulers that step with every batch; see ``AdaptiveDataParallel``.
    """

    def __init__(
        self, run: Run, optimizer: torch.optim.Optimizer, name: str, given: Sequence[Any], schedule: str
    ) -> None:
        self._run, self._optimizer = run, optimizer
        self._known = list(given)
        if schedule == SEESAW and not self._known:
            raise ValueError(
                f"schedule={SEESAW!r} turns decays of a learning-rate scheduler into batches, but lr_scheduler is "
                f"None: {_PASS_IT}"
            )
        for number, scheduler in enumerate(self._known):
            if schedule == SEESAW:
                check_readable(scheduler)
            count_optimizer_steps(scheduler, run.ledger, schedule)
            key = f"lr_scheduler/{name}/{number}"
            run.states.register(key, DictState(scheduler))
            run.states.register_rollback(scheduler.state_dict, scheduler.load_state_dict, key)
        run.states.register_rollback(self._rates, self._set_rates, f"learning rates/{name}")  # a loop sets them, too
        self._moved: dict[tuple[int, str], Any] = {}
        run.registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, self._check)

    def _is_scheduled(self) -> bool:
        """True if a scheduler was made for the optimizer, or for one that it wraps: "initial_lr" may be the loop's."""
        optimizers = [self._optimizer, *vars(self._optimizer).values()]
        return any(hasattr(getattr(each, "step", None), "_wrapped_by_lr_sched") for each in optimizers)

    def _check(self) -> None:
        """Raise ValueError if the optimizer has a scheduler that was not passed to the wrapper."""
        unknown = not self._known and self._is_scheduled()
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
        """Return the names of schedulers that no state of the run holds, and whether any was made (only in a job)."""
        made = self._run.optimizers.schedulers_of(self._optimizer) if self._run.elastic else ()
        strange = [each for each in made if id(each) not in known and not self._run.states.holds(each)]
        return [type(each).__name__ for each in strange], bool(made)

    def before_update(self) -> dict[tuple[int, str], tuple[Any, int]] | None:
        """Return what :meth:`keep_moved` compares with; None for torch's own optimizers, which change no option."""
        return None if type(self._optimizer).__module__.startswith("torch.") else self._seen()

    def keep_moved(self, before: dict[tuple[int, str], tuple[Any, int]]) -> None:
        """Keep options that an update has changed (as Prodigy and schedule-free do): a lost step undoes no update."""
        for key, now in self._seen().items():
            if not _same(now, before.get(key, now)):
                self._moved[key] = copy.deepcopy(now[0])

    def _seen(self) -> dict[tuple[int, str], tuple[Any, int]]:
        return {
            (place, name): (value, getattr(value, "_version", 0))
            for place, values in enumerate(self._numbers())
            for name, value in values.items()
        }

    def _rates(self) -> list[dict[str, Any]]:
        """Return the numbers in the optimizer's groups, which schedulers and loops change."""
        if not self._run.ledger.depth:
            self._moved.clear()
        return self._numbers()

    def _numbers(self) -> list[dict[str, Any]]:
        kinds, groups = (int, float, tuple, torch.Tensor), self._optimizer.param_groups
        return [
            {k: v for k, v in group.items() if isinstance(v, kinds) and not getattr(v, "requires_grad", False)}
            for group in groups
        ]

    def _set_rates(self, rates: list[dict[str, Any]]) -> None:
        groups = zip(self._optimizer.param_groups, rates, strict=False)  # one may have been added
        for place, (group, values) in enumerate(groups):
            for name, value in (values | {k: v for (at, k), v in self._moved.items() if at == place}).items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)  # a compiled or captured step reads this object
                else:
                    group[name] = value


def _same(one: Any, other: Any) -> bool:
    """True if two options are equal; False for arrays, and other values that cannot be compared at once."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return False


def _with_inner(scheduler: Any) -> list[Any]:
    """Return a scheduler and all schedulers nested in it.

    Nested schedulers occur in ``SequentialLR``, ``ChainedScheduler``, warm-ups and third-party wrappers.
    """
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
_BY_SCALE_AND_NOISE = (AdaScale, AdamScale, Adam, Linear, Sqrt, Unscaled)
_SETTLED = 1e-6  # of a bias correction: what is left of the first steps
_CAUGHT_UP = 1e-3  # of the rate, by which second moments are behind the batch


class LearningRates:
    """Learning rates of one optimizer, scaled by a rule during each step.

    Args:
        noise: Returns each parameter group's noise; None for a group whose noise is unknown.
        held: Factors from the previous step if they depend on the noise; the same on all ranks, and changed in place.
        adam_steps: Same as in ``NoiseTracker``; the same on all ranks, and changed in place.

    Raises TypeError or ValueError if the rule does not exist.
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
        adam_steps: list[float],
    ) -> None:
        self._optimizer = optimizer
        self._rule = resolve(rule, adam_like=is_adam_like(optimizer))
        self._by_default = rule is None
        self._warms = not isinstance(self._rule, _BY_SCALE_AND_NOISE)
        self._noise, self._epochs_done, self._policies, self._held = noise, epochs_done, policies, held
        adam = self._rule if isinstance(self._rule, Adam) else None
        self._by_noise = adam.by_noise if adam else isinstance(self._rule, (AdaScale, AdamScale))
        self._adam = adam_steps if adam and has_second_moments(optimizer) else None
        self._factors: tuple[tuple[Any, ...], tuple[float, ...]] | None = None
        self.factor = 1.0  # what the latest step has multiplied them by; the mean over the parameter groups

    @property
    def wants_statistics(self) -> str:
        """Name of the setting that requires gradient statistics; empty if none does."""
        asked = not self._by_default and self._by_noise
        return f"scaling_rule {type(self._rule).__name__}" if asked else ""

    def scale(self, scale: float, *, has_statistics: bool) -> list[dict[str, Any]] | None:
        """Set the learning rates for a batch of ``scale`` times the initial batch size.

        Args:
            has_statistics: True if the strategy provides gradient statistics; the default rule is off without them.

        Returns the previous rates, for :meth:`restore`; None if they are unchanged.
        """
        as_it_is = (scale == 1.0 and not self._warms) or (self._by_default and not has_statistics)
        by_policy = self._policies.values.rate_factor
        if self._adam is not None:
            memory = self._rule.memory_scale(self._beta2, scale) if isinstance(self._rule, Adam) else scale
            self._count(self._adam, scale, memory)
        if (
            as_it_is
            and by_policy == 1.0
            and (self._adam is None or self._adam[1:] == [self._adam[0], 1.0, self._adam[0]])
        ):
            self._held[:] = ()
            self.factor = 1.0
            return None
        groups = self._optimizer.param_groups
        factors: Sequence[float] = [1.0] * len(groups) if as_it_is else self._rule_factors(scale)
        if self._by_noise:
            factors = held_back(factors, self._held)
            self._held[:] = factors
        mean = sum(factors) / max(1, len(factors))
        if self._adam is not None:
            self._adam[2] = remembered(self._adam[2], self._beta2, self._adam[1], memory, mean)
        self.factor = by_policy * mean
        before: list[dict[str, Any]] = []
        try:
            for group, factor in zip(groups, factors, strict=True):
                options = {"lr": group["lr"] * factor * by_policy}
                if self._adam is not None and is_adam_group(group):
                    options |= _scaled_options(group, scale, memory, factor, self._adam)
                    options["lr"] *= by_policy
                before.append({name: group[name] for name in options})
                group.update(options)
        except ValueError:  # a rule of the user's has given too few or too many
            self.restore(before)
            raise
        return before

    def restore(self, before: Sequence[dict[str, Any]]) -> None:
        """Restore the rates ``before``, which :meth:`scale` returned; call this after the optimizer's step."""
        for group, options in zip(self._optimizer.param_groups, before, strict=False):
            group.update(options)

    @property
    def _beta2(self) -> float:
        return next(float(each["betas"][1]) for each in self._optimizer.param_groups if is_adam_group(each))

    def _count(self, steps: list[float], scale: float, memory: float) -> None:
        """Count an optimizer step at this scale; steps made before wrapping count as steps at the initial batch."""
        if not steps[0]:
            made = next((float(s["step"]) for s in self._optimizer.state.values() if "step" in s), 0.0)
            steps[:] = made, made, 1.0, made
        steps[:] = steps[0] + 1.0, steps[1] + memory, steps[2], steps[3] + scale

    def _rule_factors(self, scale: float) -> Sequence[float]:
        noise, progress = self._noise(), self._epochs_done()
        # Rules of one's own and warm-ups may look at the progress, which moves with every step.
        asked = (scale, noise, None if not self._warms else progress)
        if self._factors is None or self._factors[0] != asked:
            self._factors = asked, self._rule.factors(scale, noise, progress)
        return self._factors[1]


def policies_of(schedule: str) -> list[Policy]:
    """Return the adaptation policies that a schedule requires: one for ``"seesaw"``, none for other schedules."""
    return [Seesaw()] if schedule == SEESAW else []


def rules_of(
    rule: ScalingRule | str | None, schedule: str, optimizers: Sequence[torch.optim.Optimizer]
) -> list[ScalingRule | str | None]:
    """Return the learning-rate scaling rule for each optimizer; the schedule ``"seesaw"`` chooses it itself.

    Raises ValueError if ``"seesaw"`` is combined with a rule, or the rule ``"adam"`` applies to no optimizer.
    """
    if schedule == SEESAW:
        if rule is not None:
            raise ValueError(
                f"schedule={SEESAW!r} decides how rates follow the batch, so scaling_rule must be left out, but got "
                f"{rule!r}"
            )
        adam = Adam(by_noise=False, least_beta2=LEAST_BETA2)
        return [adam if is_adam_like(each) else Linear() for each in optimizers]
    named = isinstance(rule, Adam) or rule == "adam"
    if named and not any(map(has_second_moments, optimizers)):
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            "scaling_rule='adam' needs an optimizer of Adam's kind, whose groups have betas=(beta1, beta2) and eps, "
            f"but got {names}: use 'adascale' or 'linear' for it"
        )
    return [rule] * len(optimizers)


def check_readable(scheduler: Any) -> None:
    """Check that a scheduler's factor depends on progress alone, so that ``"seesaw"`` can read its future values.

    Raises ValueError if the factor depends on a metric, or changes from call to call.
    """
    for each in _with_inner(scheduler):
        why = ""
        if isinstance(each, ReduceLROnPlateau):
            why = "its rate goes by a metric"
        elif not isinstance(each, LRScheduler) and each is scheduler and not _with_inner([*vars(each).values()]):
            why = "it is no torch.optim.lr_scheduler.LRScheduler, so what its rate goes by is unknown"
        elif any(f(at) != f(at) for f in getattr(each, "lr_lambdas", ()) if f is not None for at in range(4)):
            why = "its function gives another factor each time it is asked"
        if why:
            raise ValueError(
                f"schedule={SEESAW!r} cannot read {type(each).__name__}: {why}. The factor must be a function of "
                "progress alone, as of CosineAnnealingLR, LinearLR or a LambdaLR; or use schedule='progress'"
            )


def has_second_moments(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer keeps a running mean of squared gradients, decayed by beta2."""
    return not isinstance(optimizer, torch.optim.Adamax) and any(map(is_adam_group, optimizer.param_groups))


def is_adam_group(group: dict[str, Any]) -> bool:
    """True if a parameter group has a beta2 in (0, 1) and an eps; Lion's groups, for example, do not."""
    betas = group.get("betas")
    return "eps" in group and isinstance(betas, tuple | list) and len(betas) == 2 and 0.0 < float(betas[1]) < 1.0


def _scaled_options(
    group: dict[str, Any], scale: float, memory: float, factor: float, steps: Sequence[float]
) -> dict[str, Any]:
    """Return a group's options for this scale, including the learning rate."""
    made, remembered_steps, held, initial = steps
    beta1, beta2 = map(float, group["betas"])
    # NAdam corrects by the product of its own beta1.
    first = 1.0 if "momentum_decay" in group else bias_correction(beta1, made, initial, scale)
    second = bias_correction(beta2, made, remembered_steps, memory)
    correction = 1.0 if abs(second - 1.0) < _SETTLED else math.sqrt(second)
    lag = factor * math.sqrt(held)
    if abs(lag - 1.0) > _CAUGHT_UP:
        correction *= lag
    factor = factor if abs(first - 1.0) < _SETTLED else factor / first
    return {"lr": group["lr"] * factor * correction, **adam_options(group, scale, factor, correction, memory)}
