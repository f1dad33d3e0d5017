"""Hooks on parameters that do not keep alive what they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weak_hook(method: Callable[..., None], *arguments: Any) -> Callable[[Any], None]:
    """Call a bound method, with these arguments before the hook's own, for as long as its object lives.

    torch does not show the garbage collector what hooks of ``register_post_accumulate_grad_hook`` refer to: an object
    that refers to a parameter on which it has such a hook would stay for good, and a model, its optimizer and its
    group's memory with it.
    """
    reference = weakref.WeakMethod(method)

    def hook(param: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments, param)

    return hook
