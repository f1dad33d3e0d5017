"""User hooks around an optimizer step (torch).

A pre-step hook sees the parameters that the optimizer was created with, including all gradients, and the scaled rates.
Where ranks vote on the update (tiles, sharded models), it is called before the vote, with the loop's own rates, and
even if the update is later skipped because gradients are not finite. If the state is in
tiles, a post-step hook sees the parameters as they are on all ranks. For models whose rows are sharded, see
``elastic_ray.sync.change_parameters``.

A step may be lost after its update: parameters and optimizer state keep the update, while buffers, frozen parameters
and registered states return to the step's start. When the step is drawn again, the hooks are therefore called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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


_NO_HOOK = InnerHook(lambda *_: None)


class StepHooks:
    """User hooks of an optimizer, called once per update regardless of the number of inner steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer

    @property
    def comes_first(self) -> bool:
        """True if the optimizer has pre-step hooks."""
        return bool(self._optimizer._optimizer_step_pre_hooks)

    @property
    def follows(self) -> bool:
        """True if the optimizer has post-step hooks."""
        return bool(self._optimizer._optimizer_step_post_hooks)

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
                "a hook must give optimizer.step() keyword arguments alone, but has added positional arguments: "
                f"{args[1:]!r:.80}"
            )
        return dict(given)

    @contextmanager
    def left_out(self, *, after: bool = True) -> Iterator[None]:
        """Disable the user's pre-step hooks within the context and, with ``after``, the post-step hooks too."""
        found: list[dict[int, Any]] = [self._optimizer._optimizer_step_pre_hooks]
        found += [self._optimizer._optimizer_step_post_hooks] if after else []
        kept = [{n: hook for n, hook in hooks.items() if not isinstance(hook, InnerHook)} for hooks in found]
        try:
            for hooks, users in zip(found, kept, strict=True):
                hooks.update(dict.fromkeys(users, _NO_HOOK))
            yield
        finally:
            for hooks, users in zip(found, kept, strict=True):  # other hooks may have removed some, or added others
                hooks.update({n: hook for n, hook in users.items() if n in hooks})

    def after(self, kwargs: Mapping[str, Any]) -> None:
        """Call the user's post-step hooks with the step's keyword arguments."""
        self._call(self._optimizer._optimizer_step_post_hooks, kwargs)

    @torch.no_grad()
    def repeat(self, params: Iterable[torch.Tensor], kwargs: Mapping[str, Any]) -> None:
        """Call the user's hooks for an update that was applied before its step was lost and drawn again.

        ``params`` and the optimizer's state have kept what the hooks did to them, and keep it now. Their copies are in
        host memory, because a device may not have room for them twice.
        """
        hooks = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        if not any(hooks):
            return
        states = (state for state in self._optimizer.state.values() if isinstance(state, Mapping))
        held = (each for state in states for each in state.values())
        tensors = (each for each in (*params, *held) if isinstance(each, torch.Tensor))
        kept = [(each, each.detach().to("cpu", copy=True)) for each in tensors]
        with torch.enable_grad():
            for each in hooks:
                self._call(each, kwargs)
        for tensor, value in kept:
            tensor.copy_(value)

    def _call(self, hooks: Mapping[int, Any], kwargs: Mapping[str, Any]) -> None:
        for hook in list(hooks.values()):
            if not isinstance(hook, InnerHook):
                hook(self._optimizer, (self._optimizer,), dict(kwargs))
