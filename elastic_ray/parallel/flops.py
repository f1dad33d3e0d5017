"""Floating-point operations of a model's training passes, and the peak performance of its GPU (torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from elastic_ray.steps.step import LoaderStep

PEAK_FLOPS: Mapping[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "RTX A6000": 154.8e12,
    "V100 PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense peak in half precision [FLOP/s] by words of a device's name, longer ones first; from NVIDIA's data sheets."""

_SHARED = frozenset(("MIG", "GRID"))  # the device is a slice of a GPU, whose peak is a part of the GPU's
_MOST_SHAPES = 4


def peak_of(name: str) -> float | None:
    """Return the dense half-precision peak [FLOP/s] of the GPU called ``name``; None for unknown GPUs and slices."""
    words = name.replace("-", " ").split()
    if _SHARED.intersection(words):
        return None
    for known, peak in PEAK_FLOPS.items():
        if all(word in words for word in known.split()):
            return peak
    return None


def flops_on(device: torch.device) -> TrainingFlops | None:
    """Return a counter for a model on this device; None if the device's peak is unknown."""
    peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if peak is None else TrainingFlops(peak)


class TrainingFlops:
    """Counter of a model's floating-point operations per sample, in forward and backward passes.

    The operations of the first few input shapes are counted. Later passes are not looked at: an input of a known shape
    has its operations, and any other input as many per element as the latest counted one. Passes without gradients, as
    in an evaluation, are left out.
    """

    def __init__(self, peak: float) -> None:
        self._peak = peak  # of the device [FLOP/s]
        self._known: dict[tuple[int, ...], float] = {}
        self._per_element = 0.0
        self._micro: tuple[LoaderStep | None, int, int] = None, 0, 0  # micro-batch in progress, and its samples
        self._operations = 0.0  # in this micro-batch
        self._since = 0.0, 0  # operations and samples of the micro-batches since the latest `take_peak_s`
        self._per_sample = math.nan  # operations, latest known

    def call(self, module: torch.nn.Module, args: Any, kwargs: Any, step: LoaderStep, rank: int) -> Any:
        """Run the module's forward pass in a step and return its output; if the input shape is new, count."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if first is None or not first.numel() or rank >= len(step.sizes):
            return module(*args, **kwargs)
        shape, elements = tuple(first.shape), first.numel()
        operations = self._known.get(shape)
        if operations is None and len(self._known) < _MOST_SHAPES:
            with _Counting() as counting:
                output = module(*args, **kwargs)
            operations = self._known[shape] = counting.operations
            self._per_element = operations / elements
        else:
            output = module(*args, **kwargs)
        self._add(self._per_element * elements if operations is None else operations, step, rank)
        return output

    def _add(self, operations: float, step: LoaderStep, rank: int) -> None:
        """Add a pass to those of its micro-batch; several passes in one micro-batch have the same samples."""
        before, micro, samples = self._micro
        if before is not step or micro != step.micro:
            self._since = self._since[0] + self._operations, self._since[1] + samples
            self._micro, self._operations = (step, step.micro, step.sizes[rank][step.micro]), 0.0
        self._operations += operations

    def take_peak_s(self) -> float | None:
        """Return the time per sample at the device's peak [s], from the passes since the last call; None if unknown.

        If there were none, the result is that of the passes before.
        """
        (operations, samples), self._since = self._since, (0.0, 0)
        if samples:
            self._per_sample = operations / samples
        return self._per_sample / self._peak if math.isfinite(self._per_sample) and self._per_sample > 0 else None


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts the operations of the forward passes within it, and of the backward passes that follow.

    Unlike ``FlopCounterMode`` it counts as part of torch's own machinery: torch.compile never again compiles a function
    that it has met under any other mode. A formula that fails makes the number unknown (nan), and harms nobody.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0.0

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, which has torch.compile take no notice of this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, and count its operations if they are known."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            try:
                self.operations += _passes(args) * formula(*args, **kwargs, out_val=output)
            except Exception:
                self.operations = math.nan
        return output


def _passes(args: Sequence[Any]) -> float:
    """Return the operations of an operator's forward and backward passes / those of the forward pass, 1 to 3.

    A product's backward pass has one product as large for each factor that needs a gradient: none in a frozen part of a
    model. Activation checkpointing and torch.compile hide what needs a gradient; then all factors count.
    """
    factors = [each.requires_grad for each in args[:3] if isinstance(each, torch.Tensor) and each.dim() > 1]
    return 1.0 + 2.0 * sum(factors) / len(factors) if factors and torch.is_grad_enabled() else 3.0
