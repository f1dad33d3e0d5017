"""Scalars on devices, added on the device and read with a single synchronisation per device (torch).

Reading a number from a GPU waits for all work queued on that GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor
"""A float, or a tensor without dimensions."""


def added(numbers: Iterable[Number]) -> Number:
    """Return the sum of numbers and scalar tensors, computed on the first GPU that holds a tensor (if any)."""
    found: Number = 0.0
    for each in numbers:
        if not isinstance(found, Tensor) and found == 0.0:
            found = each  # no operation, which a GPU would have to be given
        elif isinstance(found, Tensor) and isinstance(each, Tensor) and found.is_cuda and each.is_cuda:
            found = found + each.to(found.device)
        else:
            found = found + each
    return found


def read(numbers: Sequence[Number]) -> list[float]:
    """Return numbers and scalar tensors as floats, with a single wait per device."""
    found = [0.0 if isinstance(each, Tensor) else float(each) for each in numbers]
    places: dict[torch.device, list[int]] = {}
    for place, each in enumerate(numbers):
        if isinstance(each, Tensor):
            places.setdefault(each.device, []).append(place)
    for mine in places.values():
        tensors = [torch.as_tensor(numbers[place]) for place in mine]
        values = torch.stack(tensors).tolist() if len(tensors) > 1 else [tensors[0]]
        for place, value in zip(mine, values, strict=True):
            found[place] = float(value)
    return found


def read_with(vector: Tensor, numbers: Sequence[Number]) -> tuple[list[float], list[float]]:
    """Return a vector and additional numbers as floats, with a single wait for the vector's device."""
    here = [place for place, each in enumerate(numbers) if isinstance(each, Tensor) and each.device == vector.device]
    rest = read([0.0 if place in here else each for place, each in enumerate(numbers)])
    if not here:
        return vector.tolist(), rest
    beside = torch.stack([torch.as_tensor(numbers[place]) for place in here])
    values = torch.cat([vector.double(), beside.double()]).tolist()
    for place, value in zip(here, values[len(vector) :], strict=True):
        rest[place] = value
    return values[: len(vector)], rest


def with_steps_read(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return optimizer states with step counts as floats; fused optimizers keep these counts on the GPU."""
    counted = [place for place, state in enumerate(states) if isinstance(state.get("step"), Tensor)]
    steps = read([states[place]["step"] for place in counted])
    found = list(states)
    for place, step in zip(counted, steps, strict=True):
        found[place] = {**states[place], "step": step}
    return found


def real_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor as real numbers; complex tensors get an extra last dimension of 2."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def real_count(tensor: Tensor) -> int:
    """Return the number of real numbers in a tensor; complex elements count twice."""
    return math.prod(real_shape(tensor))


def local(tensor: Any) -> Any:
    """Return this worker's part of a distributed tensor (DTensor); return any other value unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of a complex tensor as real numbers; return any other tensor unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def shaped_like(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Return a view of a real vector with the shape of ``tensor``; complex if ``tensor`` is complex."""
    return (
        torch.view_as_complex(numbers.view(real_shape(tensor))) if tensor.is_complex() else numbers.view(tensor.shape)
    )
