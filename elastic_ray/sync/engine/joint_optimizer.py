"""Joint optimizer that presents a model's several optimizers to gradient synchronisation as one."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer


class JointOptimizer(torch.optim.Optimizer):
    """View of a model's optimizers as a single optimizer with all parameter groups and states.

    The view can be read and written like an optimizer, but is never stepped: each optimizer steps separately.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)  # torch's own constructor would take parameters
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of all optimizers, in optimizer order."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """States from all optimizers, keyed by parameter."""
        return JointStates(self.optimizers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError, because it is unknown which optimizer should step the new group."""
        raise RuntimeError(
            "parameter groups of one of several optimizers must be there when the model is wrapped: give the "
            "optimizer all parameters first, and freeze them with requires_grad_(False) until they are to be trained"
        )


class JointStates(MutableMapping[Any, Any]):
    """Mapping from parameter to optimizer state over several optimizers, each with its own states."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, param: Any) -> MutableMapping[Any, Any]:
        for each in self._optimizers:
            if any(p is param for group in each.param_groups for p in group["params"]):
                return each.state
        raise KeyError(param)

    def __getitem__(self, param: Any) -> Any:
        for each in self._optimizers:
            if param in each.state:
                return each.state[param]
        raise KeyError(param)

    def __setitem__(self, param: Any, state: Any) -> None:
        self._of(param)[param] = state

    def __delitem__(self, param: Any) -> None:
        del self._of(param)[param]

    def __iter__(self) -> Iterator[Any]:
        return (param for each in self._optimizers for param in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)

    def __contains__(self, param: object) -> bool:
        return any(param in each.state for each in self._optimizers)


def optimizers_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that make up a ``JointOptimizer``; a tuple of just ``optimizer`` for any other."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def group_ranges(optimizers: Sequence[torch.optim.Optimizer]) -> list[slice]:
    """Return each optimizer's range of parameter groups in the concatenated list of all groups."""
    found, first = [], 0
    for each in optimizers:
        found.append(slice(first, first + len(each.param_groups)))
        first += len(each.param_groups)
    return found


class JointDenominators:
    """Values that several Adam-like optimizers divide gradients by; see ``Denominators``."""

    def __init__(self, parts: Sequence[TiledOptimizer]) -> None:
        self._parts = [each.denominators for each in parts]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers, in optimizer order."""
        return [group for each in self._parts for group in each.param_groups]

    @property
    def idle(self) -> bool:
        """True if the optimizers hold all denominators themselves, so none need to be gathered."""
        return all(each.idle for each in self._parts)

    @property
    def state(self) -> dict[Any, Any]:
        """Denominators for all optimizers, keyed by parameter."""
        return {param: state for each in self._parts for param, state in each.state.items()}

    @property
    def adam_like(self) -> bool:
        """True if any optimizer divides gradients by a running estimate of their size."""
        return any(each.adam_like for each in self._parts)

    @property
    def outdated(self) -> bool:
        """True if any optimizer's denominators are currently unavailable; the same on all ranks."""
        return any(each.outdated for each in self._parts)
