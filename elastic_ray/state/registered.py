"""States of the user's own: those that are registered, and what modules have besides parameters and buffers (torch).

Joiners have them, checkpoints keep them. A lost step takes back those that are registered.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ray.state.codec import NotPlainError, encode
from elastic_ray.state.tree import DictState, ModuleState, Stateful, pack, unpack

logger = logging.getLogger(__name__)

_EXTRA = "_extra_state"  # torch's name for it in a state dict
_IN_MEMORY = "io.BytesIO"


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
        """Return a tree equal to the one that was taken, whose tensors belong to the caller."""
        return unpack(copy.deepcopy(self._skeleton), [tensor.clone() for tensor in self._tensors])

    def __deepcopy__(self, memo: Any) -> Remembered:
        return self


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


class RegisteredState:
    """Registered state with what a lost step needs to restore it.

    Args:
        target: has ``state_dict`` and ``load_state_dict``.
        warn: tells the job's user of a state that cannot travel.

    Attributes:
        state: its part of what all ranks share.
        extras: of a module: modes, extra states, and sums of metrics; None of anything else.
    """

    def __init__(self, target: Any, warn: Callable[[str], None] = logger.warning) -> None:
        is_module = isinstance(target, torch.nn.Module)
        self.state: Stateful = ModuleState(target) if is_module else DictState(target)
        self.extras = ModuleExtras(target, sums=True, warn=warn) if is_module else None
        self._undone = self.extras if self.extras is not None and self.extras.holds_any else None
        self._remembered = Remembered()

    def remember(self) -> Remembered:
        """Return the state's present values, to be restored if the step is lost."""
        self._remembered.take((self.state.capture(), self._undone.capture() if self._undone is not None else None))
        return self._remembered

    def roll_back(self, remembered: Remembered) -> None:
        """Return to values that were remembered."""
        state, extras = remembered.tree()
        self.state.restore(state)
        if self._undone is not None:
            self._undone.restore(extras)


class ModuleExtras:
    """Training modes of a ``module``'s parts, and its state dict beyond parameters and buffers.

    The latter are extra states (``get_extra_state``, as FP8 scales are), and what classes of the user's add by
    themselves. Modules that keep sums in ``add_state``, as metrics do, keep these for themselves: they are of one rank.
    No part is asked for what several ranks hold together, as rows of tables are: that is a state of its own, and asking
    takes all ranks.

    Args:
        sums: whether sums of metrics belong to it as well: the user has said that all ranks share them.
        warn: tells the job's user of a state that cannot travel.
    """

    in_place = False

    def __init__(self, module: nn.Module, *, sums: bool = False, warn: Callable[[str], None] = logger.warning) -> None:
        self._module, self._sums, self._warn = module, sums, warn
        self._left_out: set[str] = set()

    @property
    def holds_any(self) -> bool:
        """True if the module has more than modes."""
        return any(_has_own(part) or (self._sums and _keeps_sums(part)) for part in self._module.modules())

    def capture(self) -> Any:
        """Return modes, states and sums, each by name of the part."""
        parts = dict(self._module.named_modules())
        return {
            "training": {name: part.training for name, part in parts.items()},
            "states": {name: kept for name, part in parts.items() if (kept := self._plain(name, _own_state(part)))},
            "sums": {name: _sums_of(part) for name, part in parts.items() if self._sums and _keeps_sums(part)},
        }

    def restore(self, tree: Any) -> None:
        """Restore a captured state. Parts that are on one side alone keep their mode.

        Raises RuntimeError: the module lacks a part that has a state, or one does not take its state.
        """
        parts = dict(self._module.named_modules())
        if unknown := {*tree["states"], *tree["sums"]} - parts.keys():
            raise RuntimeError(
                "train_loop_per_worker must build the same model on every worker, but this one has no part "
                f"{', '.join(sorted(unknown)[:5])}"
            )
        for name, training in tree["training"].items():
            if name in parts:
                setattr(parts[name], "training", training)  # noqa: B010  # train() would reach what is below it
        for name, state in tree["states"].items():
            if errors := _take(parts[name], _as_given(state)):
                raise RuntimeError(f"part {name!r} does not take its state: {'; '.join(errors)}")
        for name, sums in tree["sums"].items():
            for attribute, value in sums.items():
                setattr(parts[name], attribute, value)

    def _plain(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return what can travel of a part's state: plain values, tensors, and bytes in memory."""
        kept = {}
        for key, value in state.items():
            if isinstance(value, io.BytesIO):
                value = {_IN_MEMORY: torch.frombuffer(bytearray(value.getvalue() or b"\0"), dtype=torch.uint8)}
            try:
                encode(pack(value)[0])
            except NotPlainError as error:
                self._leave_out(name, key, str(error))
            else:
                kept[key] = value
        return kept

    def _leave_out(self, name: str, key: str, error: str) -> None:
        """Report once that a state stays where it is."""
        if name not in self._left_out:
            self._left_out.add(name)
            self._warn(
                f"the state {key!r} of module {name or 'model'!r} reaches neither workers that join nor automatic "
                f"checkpoints: what is sent between workers is never unpickled, but it is more than tensors and plain "
                f"values ({error}). Have get_extra_state() give numbers, strings, lists, dicts and tensors"
            )


def _own_state(part: nn.Module) -> dict[str, Any]:
    """Return a module's own part of a state dict, without its parameters and buffers."""
    found: dict[str, Any] = {}
    if _saves_itself(part):
        part._save_to_state_dict(found, "", False)
    elif has_extra_state(part):
        found[_EXTRA] = part.get_extra_state()
    known = {*part._parameters, *part._buffers}
    return {key: _detached(value) for key, value in found.items() if key not in known}


def _saves_itself(part: nn.Module) -> bool:
    """True if a module's class writes its part of a state dict by itself, and may be asked by one rank alone."""
    kind = type(part)
    own = kind._save_to_state_dict is not nn.Module._save_to_state_dict
    return own and not getattr(kind, "travels_by_itself", False)


def _has_own(part: nn.Module) -> bool:
    return _saves_itself(part) or has_extra_state(part)


def _take(part: nn.Module, state: dict[str, Any]) -> list[str]:
    """Have a part take over what :func:`_own_state` gave; returns what it finds wrong."""
    errors: list[str] = []
    if type(part)._load_from_state_dict is nn.Module._load_from_state_dict or set(state) == {_EXTRA}:
        # Hooks of a sharded module would look for its parameters, and wait for other ranks.
        if _EXTRA in state:
            part.set_extra_state(state[_EXTRA])
    else:
        part._load_from_state_dict(state, "", {}, False, [], [], errors)
    return errors


def _as_given(state: dict[str, Any]) -> dict[str, Any]:
    """Return a captured state with bytes in memory as they were."""
    return {
        key: io.BytesIO(bytes(value[_IN_MEMORY].cpu().numpy()))
        if isinstance(value, dict) and set(value) == {_IN_MEMORY}
        else value
        for key, value in state.items()
    }


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
