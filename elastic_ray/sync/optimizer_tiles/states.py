"""Optimizer state for tiles, cut from the state of entire parameters and joined again (torch)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.state.unread import UnreadTensor, read_all
from elastic_ray.sync.optimizer_tiles.tiling import Span, Tiling
from elastic_ray.sync.sliced_gradients.sliced_gradient import SlicedGradient

State: TypeAlias = dict[str, Any]
"""What an optimizer keeps of one parameter."""


def part_of(param: Tensor, span: Span) -> Tensor:
    """Return a span's elements, in memory shared with the parameter."""
    whole = param.detach()
    return whole if span.whole else whole.view(-1)[span.start : span.start + span.length]


def cut_state(state: Mapping[str, Any], param: Tensor, span: Span) -> State:
    """Return the part of a parameter's optimizer state that belongs to a span.

    Tensors with the parameter's shape are cut in shared memory; for unread tensors, the part is read.
    """
    if span.whole:
        return {key: read_all(value) for key, value in state.items()}
    found: State = {}
    for key, value in state.items():
        if isinstance(value, UnreadTensor):
            of_elements = value.shape == param.shape
            found[key] = value.part(span.start, span.start + span.length) if of_elements else value.whole()
        elif not isinstance(value, Tensor):
            found[key] = value
        elif value.shape == param.shape:
            found[key] = value.reshape(-1)[span.start : span.start + span.length]
        else:
            found[key] = value.clone()
    return found


def joined_state(param: Tensor, parts: Sequence[tuple[Span, State]], device: torch.device | None = None) -> State:
    """Return a parameter's state, joined from all of its spans in new memory; empty if it has no state yet.

    Args:
        device: Device for large tensors in the result; None keeps their current device.
    """
    first_span, first = parts[0]
    if first_span.whole:
        return {
            key: value.to(device or value.device, copy=True) if isinstance(value, Tensor) else value
            for key, value in first.items()
        }
    found: State = {}
    for key, value in first.items():
        if not isinstance(value, Tensor):
            found[key] = value
        elif value.shape != (first_span.length,):
            found[key] = value.clone()
        else:
            whole = torch.empty(param.shape, dtype=value.dtype, device=device or value.device)
            flat = whole.view(-1)
            for span, state in parts:
                flat[span.start : span.start + span.length].copy_(state[key])
            found[key] = whole
    return found


class HeldTiles:
    """Tiles held by this rank, with a view of the parameter and the optimizer's state for each span."""

    def __init__(self, tiling: Tiling, params: Mapping[str, Parameter]) -> None:
        self.tiling, self._params = tiling, params
        self._views: dict[int, list[Parameter]] = {}
        self.states: dict[Parameter, State] = {}
        self._borrowed: list[Parameter] = []  # whose states are parts of larger tensors
        self._shown: list[tuple[Parameter, Tensor]] = []  # parameters whose gradient is one of this rank's for a while

    def __contains__(self, tile: object) -> bool:
        return tile in self._views

    @property
    def tiles(self) -> list[int]:
        """Numbers of the tiles held by this rank, in order."""
        return sorted(self._views)

    @property
    def everything(self) -> bool:
        """True if this rank holds all tiles."""
        return len(self._views) == len(self.tiling)

    def take(self, tile: int, states: Sequence[State], *, borrowed: bool = False) -> None:
        """Start holding the tile with this number.

        Args:
            borrowed: Whether tensors in ``states`` share the memory of larger tensors.
        """
        views = []
        for span, state in zip(self.tiling.tiles[tile], states, strict=True):
            param = self._params[span.name]
            view = param if span.whole else Parameter(part_of(param, span), requires_grad=param.requires_grad)
            self.states[view] = state
            views.append(view)
            if borrowed and not span.whole:
                self._borrowed.append(view)
        self._views[tile] = views

    def drop(self, tile: int) -> None:
        """Stop holding a tile, and release its optimizer state."""
        for view in self._views.pop(tile):
            del self.states[view]

    def own_memory(self, count: int) -> None:
        """Copy the states of up to ``count`` spans that are views of larger tensors, so that these can be freed."""
        while self._borrowed and count:
            view = self._borrowed.pop()
            if view in self.states:
                count -= 1
                self.states[view] = {key: owned(value) for key, value in self.states[view].items()}

    def states_of(self, tile: int) -> list[State]:
        """Return the optimizer state for each of the tile's spans, in order."""
        return [self.states[view] for view in self._views[tile]]

    def spans(self) -> Iterator[tuple[Span, Parameter]]:
        """Yield each held span (range of a parameter's elements) with a view of these elements."""
        for tile in self.tiles:
            yield from zip(self.tiling.tiles[tile], self._views[tile], strict=True)

    def update_views(self) -> None:
        """Update the views of parameters that have moved to other memory."""
        for span, view in self.spans():
            param = self._params[span.name]
            if not span.whole and view.data_ptr() != param.data_ptr() + span.start * param.element_size():
                view.data = part_of(param, span)

    def put_gradients(self) -> None:
        """Set the gradient of each view to its part of the parameter's gradient.

        Raises RuntimeError if gradients were reduced to the tiles' previous owners.
        """
        for span, view in self.spans():
            grad = self._params[span.name].grad
            if isinstance(grad, SlicedGradient):
                part = grad.part(span.start, span.length).view(view.shape)
                if span.whole:
                    self._shown.append((view, grad))
                view.grad = part
            elif not span.whole:
                view.grad = None if grad is None else grad.reshape(-1)[span.start : span.start + span.length]

    def drop_gradients(self) -> None:
        """Drop the views' gradients, and restore the ``.grad`` seen by user code."""
        for span, view in self.spans():
            if not span.whole:
                view.grad = None
        for param, grad in self._shown:
            param.grad = grad
        self._shown = []


def owned(value: Any) -> Any:
    """Return the value, cloned if it is a view that keeps a larger tensor in memory."""
    larger = isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if larger else value


def cut_tile(
    tiling: Tiling, tile: int, params: Mapping[str, Parameter], whole: Mapping[Any, Mapping[str, Any]]
) -> list[State]:
    """Return the states for a tile's spans, cut from the states of entire parameters."""
    return [cut_state(whole.get(params[s.name], {}), params[s.name], s) for s in tiling.tiles[tile]]


def assemble(
    tiling: Tiling,
    params: Mapping[str, Parameter],
    states: Mapping[int, list[State]],
    device: torch.device | None = None,
) -> dict[str, State]:
    """Return the state of each parameter with a state, keyed by name and joined from all tiles."""
    parts: dict[str, list[tuple[Span, State]]] = {}
    for tile, spans in enumerate(tiling.tiles):
        for span, state in zip(spans, states[tile], strict=True):
            parts.setdefault(span.name, []).append((span, state))
    joined = {name: joined_state(params[name], found, device) for name, found in parts.items()}
    return {name: state for name, state in joined.items() if state}


class StoredStates:
    """Optimizer states loaded from a checkpoint that have not been cut into tiles yet.

    They are kept until an update makes them outdated, so that rank 0 can return complete states on request.

    Reading raises the same errors as `UnreadTensor`.

    Args:
        optimizer: Optimizer that states are loaded into, with `UnreadTensor` in place of some tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Parameter, State] = {}

    def __bool__(self) -> bool:
        return bool(self._states)

    def take(self, tiled: Collection[Parameter]) -> None:
        """Move the states of tiled parameters from the optimizer to this object.

        The states of all other parameters stay in the optimizer; they are read and moved to the right device.
        """
        state, known, kept = self._optimizer.state, self.states(), {id(param) for param in tiled}
        self._states = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param not in known:
                    continue
                placed = placed_state(known.pop(param), param.device, group)
                if id(param) in kept:
                    state.pop(param, None)
                    self._states[param] = placed
                else:
                    state[param] = read_all(placed)

    def adapt(self, tiled: Collection[Parameter]) -> None:
        """Adapt to a changed set of tiled parameters, moving states out of the optimizer or back into it."""
        given = (self._optimizer.state.get(p, {}) for group in self._optimizer.param_groups for p in group["params"])
        if self._states or any(map(_is_unread, given)):
            self.take(tiled)

    def read(self) -> None:
        """Read all states into the optimizer."""
        self.adapt(())

    def discard(self) -> None:
        """Drop the stored states, because they are outdated."""
        self._states = {}

    def states(self) -> dict[Any, State]:
        """Return all states keyed by parameter; the optimizer's states take precedence over stored ones."""
        return {**self._states, **self._optimizer.state}

    def copies(self, params: Mapping[str, Parameter]) -> dict[str, State]:
        """Return copies of the parameters' states on the CPU, keyed by parameter name.

        Parameters without state are omitted.
        """
        known = self.states()
        return {
            name: {key: _copy(value) for key, value in known[param].items()}
            for name, param in params.items()
            if known.get(param)
        }


def _is_unread(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, UnreadTensor) for value in state.values())


def placed_state(state: Mapping[str, Any], device: torch.device, options: Mapping[str, Any]) -> State:
    """Return a parameter's optimizer state with its tensors on the devices that torch keeps them on.

    Tensors from a checkpoint are initially on the CPU. An unread tensor is read onto its device when needed.

    Args:
        options: Options of the parameter's group. Step counts stay on the CPU unless the group is fused or
            capturable.
    """
    on_cpu = () if options.get("fused") or options.get("capturable") else ("step",)
    return {
        key: _to(device, value) if isinstance(value, Tensor | UnreadTensor) and key not in on_cpu else value
        for key, value in state.items()
    }


def _to(device: torch.device, value: Tensor | UnreadTensor) -> Tensor | UnreadTensor:
    """Move a tensor to the device; a tensor that must move becomes unread, so that only its tiles use memory there."""
    if isinstance(value, UnreadTensor) or value.device == device or value.layout != torch.strided:
        return value.to(device)
    flat = value.reshape(-1)
    late = UnreadTensor(
        shape=tuple(value.shape), dtype=value.dtype, elements=lambda start, stop: flat[start:stop].clone()
    )
    return late.to(device)


def _copy(value: Any) -> Any:
    if isinstance(value, UnreadTensor):
        return value.read()
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
