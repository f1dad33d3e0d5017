"""States of the user's own: those that are registered, and what modules have besides parameters and buffers (torch).

Joiners have them, checkpoints keep them. A lost step takes back those that are registered.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

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


class ModuleExtras:
    """Which parts of a ``module`` are in training mode, and what its state dict has beyond parameters and buffers.

    The latter are extra states (``get_extra_state``, as FP8 scales are), and what classes of the user's add by
    themselves. Modules that keep sums in ``add_state``, as metrics do, keep these for themselves: they are of one rank.

    Args:
        module: the module.
        sums: whether sums of metrics belong to it as well: the user has said that all ranks share them.
    """

    in_place = False

    def __init__(self, module: nn.Module, *, sums: bool = False) -> None:
        self._module, self._sums = module, sums

    def capture(self) -> Any:
        """Names of what trains, and states by name of the part."""
        return {
            "training": [name for name, part in self._module.named_modules() if part.training],
            "states": {name: state for name, part in self._module.named_modules() if (state := _own_state(part))},
            "sums": {name: _sums_of(part) for name, part in self._metrics()},
        }

    def restore(self, tree: Any) -> None:
        """Take over a captured state.

        Raises:
            RuntimeError: the module has other parts, or one does not take its state.
        """
        parts, training = dict(self._module.named_modules()), set(tree["training"])
        unknown = {*training, *tree["states"], *tree["sums"]} - parts.keys()
        if unknown:
            raise RuntimeError(
                "train_loop_per_worker must build the same model on every worker, but this one has no part "
                f"{', '.join(sorted(unknown)[:5])}"
            )
        for name, part in parts.items():
            setattr(part, "training", name in training)  # noqa: B010  # train() would reach what is below it
        for name, state in tree["states"].items():
            errors: list[str] = []
            parts[name]._load_from_state_dict(dict(state), "", {}, False, [], [], errors)
            if errors:
                raise RuntimeError(f"part {name!r} does not take its state: {'; '.join(errors)}")
        for name, sums in tree["sums"].items():
            for attribute, value in sums.items():
                setattr(parts[name], attribute, value)

    def _metrics(self) -> Iterator[tuple[str, nn.Module]]:
        if self._sums:
            yield from ((name, part) for name, part in self._module.named_modules() if _keeps_sums(part))


def _own_state(part: nn.Module) -> dict[str, Any]:
    """What a module's own part of a state dict has beyond its parameters and buffers."""
    if type(part)._save_to_state_dict is nn.Module._save_to_state_dict and not has_extra_state(part):
        return {}
    found: dict[str, Any] = {}
    part._save_to_state_dict(found, "", False)
    known = {*part._parameters, *part._buffers}
    return {key: _detached(value) for key, value in found.items() if key not in known}


def has_extra_state(part: nn.Module) -> bool:
    """True if a module's class gives and takes an extra state."""
    kind = type(part)
    gives = kind.get_extra_state is not nn.Module.get_extra_state
    return gives and kind.set_extra_state is not nn.Module.set_extra_state


def _keeps_sums(part: nn.Module) -> bool:
    """True for modules that keep sums as ``torchmetrics.Metric`` does."""
    return isinstance(getattr(part, "_defaults", None), dict) and callable(getattr(part, "add_state", None))


def _sums_of(part: Any) -> dict[str, Any]:
    names = [*part._defaults, *(name for name in ("_update_count",) if hasattr(part, name))]
    return {name: _detached(getattr(part, name)) for name in names}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
