"""A model's learning-rate schedulers: they travel, a lost step takes them back, and none may be left out (torch)."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_ray.parallel.patches import count_optimizer_steps
from elastic_ray.run.registry import HookPoint
from elastic_ray.state.tree import DictState

if TYPE_CHECKING:
    from elastic_ray.run.run import Run

_PASS_IT = (
    "make it before the model is wrapped, and pass it as AdaptiveDataParallel(model, optimizer, lr_scheduler=...), "
    "accelerator.prepare(..., scheduler) or fabric.setup(model, optimizer, scheduler=...)"
)


class Schedulers:
    """Schedulers of one model's optimizer; see the module's text.

    Args:
        run: the run.
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
        """Refuse a scheduler that is not known.

        Raises:
            ValueError: there is one.
        """
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
