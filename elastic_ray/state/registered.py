"""States that user code registers: joiners have them, checkpoints keep them, a lost step takes them back (torch)."""

from __future__ import annotations

import copy
from typing import Any

import torch

from elastic_ray.state.module_extras import ModuleExtras
from elastic_ray.state.tree import DictState, ModuleState, Stateful, pack, unpack


class Remembered:
    """A copy of a tree of tensors in memory of its own, which is used again for the next one.

    Not copied by ``copy.deepcopy``: there is one for each state, and it is of the step in progress.
    """

    def __init__(self) -> None:
        self._skeleton: Any = None
        self._tensors: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, tree: Any) -> None:
        """Copy a tree."""
        skeleton, tensors = pack(tree)
        same = len(tensors) == len(self._tensors) and all(map(_alike, tensors, self._tensors))
        if same:
            for mine, theirs in zip(self._tensors, tensors, strict=True):
                mine.copy_(theirs)
        else:
            self._tensors = [tensor.detach().clone() for tensor in tensors]
        self._skeleton = copy.deepcopy(skeleton)

    def tree(self) -> Any:
        """A tree equal to the one that was taken, whose tensors belong to the caller."""
        return unpack(copy.deepcopy(self._skeleton), [tensor.clone() for tensor in self._tensors])

    def __deepcopy__(self, memo: Any) -> Remembered:
        return self


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


class RegisteredState:
    """What a lost step takes back of one state.

    Args:
        target: has ``state_dict`` and ``load_state_dict``.

    Attributes:
        state: its part of what all ranks share.
        extras: of a module: modes, extra states, and sums of metrics; None of anything else.
    """

    def __init__(self, target: Any) -> None:
        self.state: Stateful = ModuleState(target) if isinstance(target, torch.nn.Module) else DictState(target)
        self.extras = ModuleExtras(target, sums=True) if isinstance(target, torch.nn.Module) else None
        self._remembered = Remembered()

    def remember(self) -> Remembered:
        """Its present values."""
        self._remembered.take((self.state.capture(), self.extras.capture() if self.extras is not None else None))
        return self._remembered

    def roll_back(self, remembered: Remembered) -> None:
        """Return to values that were remembered."""
        state, extras = remembered.tree()
        self.state.restore(state)
        if self.extras is not None:
            self.extras.restore(extras)
