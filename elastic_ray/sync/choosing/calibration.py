"""SHELL: one probe of a group's links: a collective of a known size among gradients, timed (torch)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from elastic_ray.sync.choosing import links
from elastic_ray.sync.choosing.links import PARTS, Probe
from elastic_ray.sync.operations.bucket_operation import GradientCollectives

# Small collectives are short and their times scatter: the best of a few. A large one is made once in a step.
_SMALL_BYTES, _REPEATS = 1 << 20, 3


def measure(probe: Probe, group: GradientCollectives, wait: Callable[[Any], object], device: torch.device) -> float:
    """Make a collective, on all ranks alike, and return how long it took here [s].

    All ranks must come from a collective that they have made together, so that none waits for another.

    Args:
        probe: which.
        group: where.
        wait: for a work; raises CommunicationFailedError where the group breaks.
        device: of the gradients.
    """
    launch = _prepare(probe, group, device)
    best = float("inf")
    for _ in range(_REPEATS if probe.nbytes <= _SMALL_BYTES else 1):
        begin_s = time.perf_counter()
        for work in launch():
            wait(work)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin_s)
    return best


def _prepare(probe: Probe, group: GradientCollectives, device: torch.device) -> Callable[[], list[Any]]:
    """Buffers of a probe, and what starts it."""
    world, dtype = group.world_size, torch.float32
    if probe.operation == links.ALL_REDUCE_BF16:
        dtype = torch.bfloat16
    numel = max(world, probe.nbytes // dtype.itemsize // world * world)
    tensor = torch.zeros(numel, dtype=dtype, device=device)
    match probe.operation:
        case links.ALL_REDUCE | links.ALL_REDUCE_BF16:
            return lambda: [group.all_reduce(tensor)]
        case links.ALL_REDUCE_PARTS:
            return lambda: [group.all_reduce(part) for part in tensor.chunk(PARTS)]
        case links.ALL_GATHER:
            mine = torch.zeros(numel // world, dtype=dtype, device=device)
            return lambda: [group.all_gather(tensor, mine)]
        case links.ALL_TO_ALL:
            other = torch.zeros_like(tensor)
            return lambda: [group.all_to_all(other, tensor)]
        case links.REDUCE:
            return lambda: [group.reduce(tensor, 0)]
        case links.BROADCAST:
            return lambda: [group.broadcast(tensor, 0)]
    raise AssertionError(f"there is no probe for {probe.operation}")
