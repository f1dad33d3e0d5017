"""User hooks around an optimizer step executed in parts, such as tiles (torch).

A pre-step hook sees the parameters that the optimizer was created with, including all gradients. It is called before
the ranks vote on the update, even if the update is later skipped because gradients are not finite. If tiles were
stepped, a post-step hook sees the parameters as they are on all ranks. For models whose rows are sharded, see
``elastic_ray.sync.change_parameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class InnerHook:
    """Hook that implements part of the optimizer step and was not registered by the user."""

    def __init__(self, call: Callable[[torch.optim.Optimizer, Any, Any], None]) -> None:
        self._call = call

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Call the wrapped function."""
        self._call(optimizer, args, kwargs)


class StepHooks:
    """User hooks of an optimizer, called once per step regardless of the number of inner steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer

    def before(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Call the user's pre-step hooks with ``kwargs``; return the step's arguments as modified by the hooks.

        Raises RuntimeError if a hook returned anything other than None or new arguments, or added positional arguments.
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
                "a hook has given optimizer.step() positional arguments, which an optimizer that steps tiles does not "
                f"accept: {args[1:]!r:.80}"
            )
        return dict(given)

    @contextmanager
    def left_out(self, *, after: bool = True) -> Iterator[None]:
        """Disable the user's pre-step hooks within the context and, with ``after``, the post-step hooks too."""
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
        """Call the user's post-step hooks with the step's keyword arguments."""
        for hook in list(self._optimizer._optimizer_step_post_hooks.values()):
            if not isinstance(hook, InnerHook):
                hook(self._optimizer, (self._optimizer,), dict(kwargs))


def _become(hooks: dict[int, Any], others: Mapping[int, Any]) -> None:
    """Replace the hooks in place, because the handles for removing hooks refer to the dictionary."""
    hooks.clear()
    hooks.update(others)
