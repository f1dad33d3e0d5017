"""SHELL: what a worker process does before it belongs to a job, so that no first step waits for it."""

from __future__ import annotations

import importlib
import resource

import torch

# What a train function or its first step imports, elastic_ray's own names among them. ray.train would be a fifth of
# the time of a start, and is imported in time by train functions that use it: beside the others' steps.
_MODULES = (
    "elastic_ray.worker.worker",
    "elastic_ray.parallel.wrapper",
    "elastic_ray.data.loader",
    "torch.utils.data",
    "torch.distributed",
)


def warm_up() -> None:
    """Import modules, and run torch once forward, backward and through an optimizer; CUDA stays untouched."""
    for name in _MODULES:
        importlib.import_module(name)
    weight = torch.ones(8, 8, requires_grad=True)
    (torch.ones(8, 8) @ weight).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([weight], lr=0.0).step()  # the first optimizer of a process imports half of torch's compiler


def resident_bytes() -> int:
    """Resident memory of this process, at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
