"""Whole states that a rank goes on from: it takes the tiles that it is to hold, and reads no others (torch)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.state.unread import UnreadTensor, read_all
from elastic_ray.sync.optimizer_tiles.states import State


class StoredStates:
    """See the module's text. They are kept until they count no more, so that rank 0 can be asked for all of them.

    Errors of reading are those of `UnreadTensor`.

    Args:
        optimizer: is given whole states, in which `UnreadTensor` may stand for tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Parameter, State] = {}

    def __bool__(self) -> bool:
        return bool(self._states)

    def take(self, tiled: Collection[Parameter]) -> None:
        """The optimizer was given states: it has none from now on that is not read, or not where its parameter is.

        Args:
            tiled: parameters in tiles, whose states are kept here.
        """
        state, known, kept = self._optimizer.state, self.states(), {id(param) for param in tiled}
        self._states = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param not in known:
                    continue
                placed = placed_state(known.pop(param), param.device, group)
                if id(param) in kept:
                    state.pop(param, None)
                    self._states[param] = placed
                else:
                    state[param] = read_all(placed)

    def follow(self, tiled: Collection[Parameter]) -> None:
        """Other parameters are in tiles than before."""
        given = (self._optimizer.state.get(p, {}) for group in self._optimizer.param_groups for p in group["params"])
        if self._states or any(map(_is_unread, given)):
            self.take(tiled)

    def read(self) -> None:
        """The optimizer holds all of them from now on."""
        self.follow(())

    def forget(self) -> None:
        """They count no more."""
        self._states = {}

    def states(self) -> dict[Any, State]:
        """By parameter, with those that the optimizer holds; these were given later."""
        return {**self._states, **self._optimizer.state}

    def copies(self, params: Mapping[str, Parameter]) -> dict[str, State]:
        """Whole states of parameters by name, of memory of their own on the CPU; without those that have none."""
        known = self.states()
        return {
            name: {key: _copy(value) for key, value in known[param].items()}
            for name, param in params.items()
            if known.get(param)
        }


def _is_unread(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, UnreadTensor) for value in state.values())


def placed_state(state: Mapping[str, Any], device: torch.device, options: Mapping[str, Any]) -> State:
    """A state whose tensors are where torch has them, or will be once they are read; a checkpoint's are on the CPU.

    Args:
        state: of a parameter.
        device: of the parameter.
        options: of its group. Torch counts steps on the CPU unless it is told to be fused or capturable.
    """
    on_cpu = () if options.get("fused") or options.get("capturable") else ("step",)
    return {
        key: _to(device, value) if isinstance(value, Tensor | UnreadTensor) and key not in on_cpu else value
        for key, value in state.items()
    }


def _to(device: torch.device, value: Tensor | UnreadTensor) -> Tensor | UnreadTensor:
    """Where the device may have no room for all of it, a tensor is not there before its tiles are taken."""
    if isinstance(value, UnreadTensor) or value.device == device or value.layout != torch.strided:
        return value.to(device)
    flat = value.reshape(-1)
    late = UnreadTensor(
        shape=tuple(value.shape), dtype=value.dtype, elements=lambda start, stop: flat[start:stop].clone()
    )
    return late.to(device)


def _copy(value: Any) -> Any:
    if isinstance(value, UnreadTensor):
        return value.read()
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
