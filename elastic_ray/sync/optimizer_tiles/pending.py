"""Pending updates: this rank voted for them, but does not know whether all other ranks did (torch)."""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.sync.optimizer_tiles.states import HeldTiles, State

_BY_SCALER = ("grad_scale", "found_inf")
"""What AMP's scaler tells a fused optimizer of a step, which then divides gradients, or leaves the update out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """Identity of a completed update: its number, the generation that made it, and its learning rates."""

    number: int = 0
    generation: int = 0
    rates: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """Key that is equal on all ranks for the same update and different for different updates."""
        return self.number, self.generation

    def next(self, generation: int, optimizer: torch.optim.Optimizer) -> Update:
        """Return the identity of this optimizer's next update, in the given generation."""
        return Update(self.number + 1, generation, rates_of(optimizer))


class PendingUpdate:
    """Copies of everything needed to make an update later, once it is known that all ranks voted for it.

    By that time, the model may have new parameters, and the optimizer may have a later step's options.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        held: HeldTiles,
        params: Mapping[str, Parameter],
        number: int,
        generation: int,
    ) -> None:
        self.update = number, generation
        self._optimizer, self._held, self._params = optimizer, held, params
        held.update_views()
        held.put_gradients()
        self._parts: list[tuple[str, Parameter, Tensor, Tensor | None]] = [
            (span.name, view, view.detach().clone(), None if view.grad is None else view.grad.detach().clone())
            for span, view in held.spans()
        ]
        held.drop_gradients()
        self._options = options_of(optimizer)
        self._by_scaler = {name: getattr(optimizer, name) for name in _BY_SCALER if hasattr(optimizer, name)}

    def make(self, apply: Callable[[], Any], rates: Sequence[float]) -> None:
        """Make the update with ``apply`` (the optimizer's step) and the learning rates used on other ranks."""
        states: dict[Parameter, State] = {}
        shown: list[tuple[str, Parameter]] = []
        made: list[tuple[Parameter, Parameter]] = []
        for name, view, value, grad in self._parts:
            part = Parameter(value, requires_grad=view.requires_grad)
            part.grad = grad
            states[part] = self._held.states[view]
            shown.append((name, part))
            made.append((view, part))
        with (
            as_then(self._optimizer, self._options, rates),
            self._without_others(),
            self._scaled(),
            tiles_shown(self._optimizer, self._params, shown, states),
        ):
            apply()
        with torch.no_grad():
            for view, part in made:
                self._held.states[view] = states[part]
                view.copy_(part)

    @contextmanager
    def _scaled(self) -> Iterator[None]:
        """Restore, within the context, the attributes that AMP's scaler set on the optimizer; gradients are scaled."""
        present = {name: getattr(self._optimizer, name) for name in self._by_scaler if hasattr(self._optimizer, name)}
        for name, value in self._by_scaler.items():
            setattr(self._optimizer, name, value)
        try:
            yield
        finally:
            for name in self._by_scaler:
                delattr(self._optimizer, name)
            for name, value in present.items():
                setattr(self._optimizer, name, value)

    @contextmanager
    def _without_others(self) -> Iterator[None]:
        """Hide the gradients of untiled parameters from the optimizer within the context."""
        mine = {id(param) for param in self._params.values()}
        others = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"] if id(p) not in mine]
        try:
            for param, _ in others:
                param.grad = None
            yield
        finally:
            for param, grad in others:
                param.grad = grad


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each parameter group's options (such as betas), to be restored with :func:`as_then`."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


@contextmanager
def as_then(
    optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]], rates: Sequence[float]
) -> Iterator[None]:
    """Set the optimizer's options to an earlier step's options within the context.

    Args:
        rates: Learning rates used for the update on other ranks.
    """
    groups, before = optimizer.param_groups, options_of(optimizer)
    try:
        for group, then in zip(groups, options, strict=True):
            group.update(then)
        _set_rates(groups, rates)
        yield
    finally:
        for group, present in zip(groups, before, strict=True):
            group.update(present)


def tiles_shown(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, Parameter],
    shown: Sequence[tuple[str, Parameter]],
    states: dict[Parameter, State],
) -> Any:
    """Return a context manager that makes the optimizer hold parts of parameters instead of entire ones.

    Args:
        shown: Parts of parameters, each with its parameter's name.
        states: Optimizer states of the parts; updated when the context ends.
    """
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    hidden = {id(param) for param in params.values()}
    return swapped(optimizer, hidden, [(part, groups[id(params[name])]) for name, part in shown], states)


_SCALED = ("lr", "betas", "eps", "weight_decay")
"""Options that follow the batch."""


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Return the learning rates for all groups, and their other numeric options that depend on batch size."""
    return tuple(float(number) for group in optimizer.param_groups for name in _SCALED for number in _in(group, name))


def _in(group: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    value = group.get(name)
    several = tuple(value) if isinstance(value, tuple | list) else (value,)
    return several if all(isinstance(each, int | float | Tensor) for each in several) else ()


def _set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Set the options that :func:`rates_of` returned."""
    given = iter(rates)
    for group in groups:
        for name in _SCALED:
            present = _in(group, name)
            numbers = zip(present, [next(given) for _ in present], strict=True)
            new = tuple(torch.full_like(old, value) if isinstance(old, Tensor) else value for old, value in numbers)
            if new:
                group[name] = new if isinstance(group[name], tuple | list) else new[0]


def update_digest(params: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Return a 32-bit digest of the learning rates and the set of parameters that have a gradient.

    Ranks compare the digest before an update; it must be the same on all of them.
    """
    return zlib.crc32(repr(rates_of(optimizer)).encode(), zlib.crc32(bytes(p.grad is not None for p in params)))


@contextmanager
def swapped(
    optimizer: torch.optim.Optimizer,
    hidden: Collection[int],
    shown: Sequence[tuple[Parameter, int]],
    states: dict[Parameter, State],
) -> Iterator[None]:
    """Replace the optimizer's parameters within the context, keeping the option dictionaries of its groups.

    Args:
        hidden: ``id`` of the parameters to hide.
        shown: Parameters to use in their place, each with its group's position.
        states: Optimizer states of these parameters; updated when the context ends.
    """
    groups, state = optimizer.param_groups, optimizer.state
    kept = [group["params"] for group in groups]
    merged: collections.defaultdict[Any, Any] = collections.defaultdict(dict, state)
    merged.update({param: states[param] for param, _ in shown if states.get(param)})
    try:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = [param for param in params if id(param) not in hidden]
        for param, number in shown:
            groups[number]["params"].append(param)
        # Some optimizers do not bear a group without parameters.
        optimizer.param_groups = [group for group in groups if group["params"]]
        optimizer.state = merged
        yield
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params
        optimizer.param_groups, optimizer.state = groups, state
        for param, _ in shown:
            states[param] = merged.pop(param, {})
        state.update(merged)
