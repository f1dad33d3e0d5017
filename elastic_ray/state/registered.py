"""States registered with a run: copies to restore after a lost step, and what modules keep besides their tensors."""

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
    """Copy of a tree of tensors, whose memory is reused for the next copy.

    ``copy.deepcopy`` returns the same object, because each state has a single copy, for the current step. Before a step
    nested in the current one, :meth:`moved` preserves that copy.
    """

    def __init__(self) -> None:
        self._skeleton: Any = None
        self._tensors: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, tree: Any) -> None:
        """Copy a tree, replacing the previous copy."""
        skeleton, tensors = pack(tree)
        same = len(tensors) == len(self._tensors) and all(map(_alike, tensors, self._tensors))
        if same:
            for mine, theirs in zip(self._tensors, tensors, strict=True):
                mine.copy_(theirs)
        else:
            self._tensors = [tensor.detach().clone() for tensor in tensors]
        self._skeleton = copy.deepcopy(skeleton)

    def tree(self) -> Any:
        """Return a copy of the remembered tree, whose tensors belong to the caller."""
        return unpack(copy.deepcopy(self._skeleton), [tensor.clone() for tensor in self._tensors])

    def moved(self) -> Remembered:
        """Return the copy as a separate object, which the next :meth:`take` does not overwrite."""
        kept = Remembered()
        kept._skeleton, kept._tensors, self._tensors = self._skeleton, self._tensors, []
        return kept

    def __deepcopy__(self, memo: Any) -> Remembered:
        return self


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


class RegisteredState:
    """Registered state, and everything needed to restore it after a lost step.

    Args:
        target: Object with ``state_dict`` and ``load_state_dict``.
        warn: Warns the job's user about a state that cannot be sent.

    Attributes:
        state: The part of the state that all ranks share.
        extras: For a module: modes, extra states, and sums of metrics; None for any other object.
    """

    def __init__(self, target: Any, warn: Callable[[str], None] = logger.warning) -> None:
        is_module = isinstance(target, torch.nn.Module)
        self.state: Stateful = ModuleState(target) if is_module else DictState(target)
        self.extras = ModuleExtras(target, sums=True, warn=warn) if is_module else None
        self._undone = self.extras if self.extras is not None and self.extras.holds_any else None
        self._remembered = Remembered()

    def remember(self) -> Remembered:
        """Return a copy of the state's current values, for :meth:`roll_back`."""
        self._remembered.take((self.state.capture(), self._undone.capture() if self._undone is not None else None))
        return self._remembered

    def roll_back(self, remembered: Remembered) -> None:
        """Restore the values from :meth:`remember`."""
        state, extras = remembered.tree()
        self.state.restore(state)
        if self._undone is not None:
            self._undone.restore(extras)


class ModuleExtras:
    """Training modes of a ``module``'s submodules, and its state dict beyond parameters and buffers.

    The latter consists of extra states (``get_extra_state``, such as FP8 scales) and entries that user classes add
    themselves. Modules that keep sums with ``add_state``, as metrics do, keep them local to each rank. State that
    several ranks hold together, such as table rows, is not requested from submodules; it is captured separately, by a
    call on every rank.

    Args:
        sums: Whether sums of metrics are included, because the user has declared that all ranks share them.
        warn: Warns the job's user about a state that cannot be sent.
    """

    def __init__(self, module: nn.Module, *, sums: bool = False, warn: Callable[[str], None] = logger.warning) -> None:
        self._module, self._sums, self._warn = module, sums, warn
        self._left_out: set[str] = set()

    @property
    def holds_any(self) -> bool:
        """True if the module has extra states or sums of metrics, and not only training modes."""
        return any(_has_own(part) or (self._sums and _keeps_sums(part)) for part in self._module.modules())

    def capture(self) -> Any:
        """Return training modes, extra states and sums of metrics, each keyed by submodule name."""
        parts = dict(self._module.named_modules())
        return {
            "training": {name: part.training for name, part in parts.items()},
            "states": {name: kept for name, part in parts.items() if (kept := self._plain(name, _own_state(part)))},
            "sums": {name: _sums_of(part) for name, part in parts.items() if self._sums and _keeps_sums(part)},
        }

    def restore(self, tree: Any) -> None:
        """Restore a captured state. Submodules without a captured mode keep their mode.

        Raises RuntimeError if the module lacks a submodule that has a captured state, or if a submodule rejects its
        state.
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
            if errors := _load_state(parts[name], _as_given(state)):
                raise RuntimeError(f"part {name!r} does not take its state: {'; '.join(errors)}")
        for name, sums in tree["sums"].items():
            for attribute, value in sums.items():
                setattr(parts[name], attribute, value)

    def _plain(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a submodule's state that can be sent: plain values, tensors, and in-memory bytes."""
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
        """Warn once that a submodule's state is not sent."""
        if name not in self._left_out:
            self._left_out.add(name)
            self._warn(
                f"the state {key!r} of module {name or 'model'!r} reaches neither workers that join nor automatic "
                f"checkpoints: what is sent between workers is never unpickled, but it is more than tensors and plain "
                f"values ({error}). Have get_extra_state() give numbers, strings, lists, dicts and tensors"
            )


def _own_state(part: nn.Module) -> dict[str, Any]:
    """Return a module's own entries of a state dict, without its parameters and buffers."""
    found: dict[str, Any] = {}
    if _saves_itself(part):
        part._save_to_state_dict(found, "", False)
    elif has_extra_state(part):
        found[_EXTRA] = part.get_extra_state()
    known = {*part._parameters, *part._buffers}
    return {key: detached(value) for key, value in found.items() if key not in known}


def _saves_itself(part: nn.Module) -> bool:
    """True if a module's class writes its own part of a state dict, and a single rank may call it."""
    kind = type(part)
    own = kind._save_to_state_dict is not nn.Module._save_to_state_dict
    return own and not getattr(kind, "travels_by_itself", False)


def _has_own(part: nn.Module) -> bool:
    return _saves_itself(part) or has_extra_state(part)


def _load_state(part: nn.Module, state: dict[str, Any]) -> list[str]:
    """Load a state from :func:`_own_state` into a module; return the errors that the module reports."""
    errors: list[str] = []
    if type(part)._load_from_state_dict is nn.Module._load_from_state_dict or set(state) == {_EXTRA}:
        # Hooks of a sharded module would look for its parameters, and wait for other ranks.
        if _EXTRA in state:
            part.set_extra_state(state[_EXTRA])
    else:
        part._load_from_state_dict(state, "", {}, False, [], [], errors)
    return errors


def _as_given(state: dict[str, Any]) -> dict[str, Any]:
    """Return a captured state with in-memory bytes converted back to ``BytesIO``."""
    return {
        key: io.BytesIO(bytes(value[_IN_MEMORY].cpu().numpy()))
        if isinstance(value, dict) and set(value) == {_IN_MEMORY}
        else value
        for key, value in state.items()
    }


def has_extra_state(part: nn.Module) -> bool:
    """True if a module's class defines both ``get_extra_state`` and ``set_extra_state``."""
    kind = type(part)
    gives = kind.get_extra_state is not nn.Module.get_extra_state
    return gives and kind.set_extra_state is not nn.Module.set_extra_state


def _keeps_sums(part: nn.Module) -> bool:
    """True if the module keeps sums like ``torchmetrics.Metric``."""
    return isinstance(getattr(part, "_defaults", None), dict) and callable(getattr(part, "add_state", None))


def _sums_of(part: Any) -> dict[str, Any]:
    names = [*part._defaults, *(name for name in ("_update_count",) if hasattr(part, name))]
    return {name: detached(getattr(part, name)) for name in names}


def detached(value: Any) -> Any:
    """Return a tensor without the graph that it came from, and anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value
