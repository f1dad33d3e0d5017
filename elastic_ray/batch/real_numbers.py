"""Complex tensors as the real numbers that they are made of: gradients travel and are measured as these (torch)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def real_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of a tensor's real numbers: of a complex one with its two parts last, as ``torch.view_as_real``."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def real_count(tensor: Tensor) -> int:
    """Number of real numbers in a tensor."""
    return math.prod(real_shape(tensor))


def as_real(tensor: Tensor) -> Tensor:
    """A view of a tensor's real numbers; the tensor itself unless it is complex."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def shaped_like(numbers: Tensor, tensor: Tensor) -> Tensor:
    """A view of a vector of real numbers in a tensor's shape, complex if that is."""
    return (
        torch.view_as_complex(numbers.view(real_shape(tensor))) if tensor.is_complex() else numbers.view(tensor.shape)
    )
