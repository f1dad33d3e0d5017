"""Hooks around an optimizer's step, where the step is made of parts of parameters, as of tiles (torch).

A hook of the user's that comes before the step sees the parameters that its optimizer was given, with all gradients; it
is called before the ranks vote on the update, also where that is then left out, for its gradients are not finite.
Behind a step of tiles it sees them as they are on all ranks. Behind one of a sharded model's rows see
``elastic_ray.sync.change_parameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class InnerHook:
    """Hook that belongs to the step itself, whatever parts the step has."""

    def __init__(self, call: Callable[[torch.optim.Optimizer, Any, Any], None]) -> None:
        self._call = call

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Call it."""
        self._call(optimizer, args, kwargs)


class StepHooks:
    """Calls the user's hooks once per step, however many inner optimizer steps it takes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer

    def before(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Call the hooks before a step; return the step's arguments.

        Raises RuntimeError: a hook has returned something else than None or new arguments.
        """
        args: tuple[Any, ...] = (self._optimizer,)
        given = dict(kwargs)
        for hook in list(self._optimizer._optimizer_step_pre_hooks.values()):
            found = None if isinstance(hook, InnerHook) else hook(self._optimizer, args, given)
            if found is None:
                continue
            if not isinstance(found, tuple) or len(found) != 2:
                raise RuntimeError(
                    f"a hook must return None or a tuple of (new_args, new_kwargs), but got {found!r:.80}"
                )
            args, given = found
        if len(args) > 1:
            raise RuntimeError(
                "a hook has given optimizer.step() positional arguments, which one that steps tiles does not take: "
                f"{args[1:]!r:.80}"
            )
        return dict(given)

    @contextmanager
    def left_out(self, *, after: bool = True) -> Iterator[None]:
        """Have the optimizer's step call inner hooks only within; ``after``: after it as well, not only before."""
        found: list[dict[int, Any]] = [self._optimizer._optimizer_step_pre_hooks]
        found += [self._optimizer._optimizer_step_post_hooks] if after else []
        kept = [dict(hooks) for hooks in found]
        try:
            for hooks, all_of_them in zip(found, kept, strict=True):
                _become(hooks, {n: hook for n, hook in all_of_them.items() if isinstance(hook, InnerHook)})
            yield
        finally:
            for hooks, all_of_them in zip(found, kept, strict=True):
                _become(hooks, all_of_them)

    def after(self, kwargs: Mapping[str, Any]) -> None:
        """Call those that come after a step; ``kwargs`` is what it was called with."""
        for hook in list(self._optimizer._optimizer_step_post_hooks.values()):
            if not isinstance(hook, InnerHook):
                hook(self._optimizer, (self._optimizer,), dict(kwargs))


def _become(hooks: dict[int, Any], others: Mapping[int, Any]) -> None:
    """Replace the hooks in place, because the handles that remove them refer to the dictionary."""
    hooks.clear()
    hooks.update(others)
