"""Floating-point operations of a model, and the peak of its GPU (torch).

MFU = 3 F / peak, with F the operations of the forward passes in a second: a backward pass takes twice as many, and what
checkpoints compute anew does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

PEAK_FLOPS: Mapping[str, float] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense peak in half precision [FLOP/s] by words of a device's name, longer ones first; from NVIDIA's data sheets."""

_MOST_SHAPES = 4


def peak_of(name: str) -> float | None:
    """Peak of a device [FLOP/s]; None where it is not known."""
    words = name.replace("-", " ").split()
    for known, peak in PEAK_FLOPS.items():
        if all(word in words for word in known.split()):
            return peak
    return None


class ForwardFlops:
    """Counts a model's operations, once for each shape of its first argument, of which a few tell all.

    Attributes:
        per_sample: of one sample's forward pass, by the latest shape counted; None before one was.
    """

    def __init__(self) -> None:
        self.per_sample: float | None = None
        self._shapes: set[tuple[int, ...]] = set()

    def call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """The module's forward, counted where its shape is new."""
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        shape = tuple(first.shape) if first is not None else ()
        if not shape or shape in self._shapes or len(self._shapes) >= _MOST_SHAPES:
            return module(*args, **kwargs)
        self._shapes.add(shape)
        with FlopCounterMode(display=False) as counter:
            output = module(*args, **kwargs)
        total = counter.get_total_flops()
        self.per_sample = total / shape[0] if total and shape[0] else self.per_sample
        return output
