"""What a module has besides parameters and buffers: modes, extra state, and what its state dict adds (torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


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
            part.training = name in training
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
