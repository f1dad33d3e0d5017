"""Sparse backward for embedding layers configured for dense gradients (torch)."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch


class SparseBackward:
    """Switch that sets a layer to ``sparse=True`` during its forward pass, unless user code could notice.

    Args:
        layer: An ``Embedding`` or ``EmbeddingBag``; other layers are not changed.
    """

    def __init__(self, layer: torch.nn.Module, param: torch.nn.Parameter) -> None:
        self._layer = layer
        self._handles: list[Any] = []
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and not layer.sparse:
            switch = _Switch(param)
            self._handles = [
                layer.register_forward_pre_hook(switch.before),
                # Before those of the user, which see the layer as it is.
                layer.register_forward_hook(switch.after, always_call=True, prepend=True),
            ]

    def close(self) -> None:
        """Restore the layer and remove the hooks."""
        switch_off(self._layer)
        for handle in self._handles:
            handle.remove()


def switch_off(layer: torch.nn.Module) -> None:
    """Restore a layer's own setting after an interrupted forward pass, because torch then does not call hooks."""
    for hook in layer._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _Switch):
            owner.off(layer)


_OF_TORCH = (torch.nn.Embedding.forward, torch.nn.EmbeddingBag.forward)


class _Gate(torch.autograd.Function):
    """Identity of a table whose gradient stays sparse only on its way to ``.grad``, and is otherwise made dense."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor) -> torch.Tensor:
        ctx.param = table
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if grad.is_sparse and (torch.is_grad_enabled() or not _accumulates(ctx.param)):
            return grad.to_dense()
        return grad


def _accumulates(param: torch.Tensor) -> bool:
    """True if the current backward pass adds to the parameter's ``.grad``."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is autograd.grad, or backward() for some inputs
        return False


class _Switch:
    """Hooks on one layer. Copies of the layer, by ``deepcopy`` or pickle, have hooks that do nothing.

    Args:
        param: Table of the layer; None for a copy.
        switched: Whether the copy was made while the layer was switched; the copy's first forward pass undoes the
            switch.
    """

    def __init__(self, param: torch.nn.Parameter | None, switched: bool = False) -> None:
        self._param, self._switched = param, switched

    def before(self, layer: Any, args: Any) -> None:
        """Switch the layer to sparse gradients before its forward pass, if torch supports them for this layer."""
        self.off(layer)  # the one before may have been interrupted
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if self._param is None or layer.weight is not self._param:
            return
        if layer.sparse or not self._param.requires_grad or not torch.is_grad_enabled():
            return
        # Torch has no sparse gradient of these.
        if layer.scale_grad_by_freq or getattr(layer, "mode", "") == "max":
            return
        # These write to the table in forward, or may look at it there.
        if layer.max_norm is not None or type(layer).forward not in _OF_TORCH:
            return
        if _has_strange_hooks(self._param):
            return
        layer.sparse = self._switched = True
        layer._parameters["weight"] = gated = _Gate.apply(self._param)  # type: ignore[no-untyped-call]
        # Torch copies no tensors with a history; who copies the layer now, in a hook, wants the table.
        gated.__deepcopy__ = functools.partial(copy.deepcopy, self._param)

    def after(self, layer: Any, args: Any, output: Any) -> None:
        """Restore the layer after its forward pass, even if the pass raised an error."""
        self.off(layer)

    def off(self, layer: Any) -> None:
        """Undo the changes made in :meth:`before`."""
        if self._switched:
            layer.sparse = self._switched = False
            if self._param is not None:
                layer._parameters["weight"] = self._param

    def __reduce__(self) -> Any:
        return _Switch, (None, self._switched)


def _has_strange_hooks(param: torch.nn.Parameter) -> bool:
    """True if user hooks see gradients before they have the expected layout."""
    hooks = [
        *(param._backward_hooks or {}).values(),
        *list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()),
    ]
    return any(not _is_ours(hook) for hook in hooks)


def _is_ours(hook: Any) -> bool:
    """True if a hook belongs to this package; hooks registered after it see the expected layout."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith("elastic_ray.sync.")
