"""A worker alone on its device, and the collectives that it would have with others, in a group of one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ray.communication.communicator import GradientGroup, _form_gloo
from elastic_ray.communication.nccl import start_nccl
from elastic_ray.monitoring.measures import OPERATIONS
from tests.gpu.trained import STRATEGIES, check


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_alone_trains_as_on_the_cpu(device: torch.device, strategy: str) -> None:
    check(strategy, device)


def backend_of_one(device: torch.device) -> Any:
    """As a generation forms it."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    if device.type == "cuda":
        return start_nccl(store, 0, 1, 10.0)
    return _form_gloo(store, 0, 1, dist.ProcessGroupGloo.create_device(hostname="127.0.0.1"), time.monotonic() + 10.0)


def test_every_collective_of_gradients_takes_tensors_of_the_device(device: torch.device) -> None:
    backend = backend_of_one(device)
    group = GradientGroup(
        0,
        1,
        {device.type: backend},
        lambda operation, *arguments: operation(*arguments),
        dict.fromkeys(OPERATIONS, 0),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        whole = torch.arange(6, device=device).to(dtype)
        for start in (group.all_reduce, lambda t: group.reduce(t, 0), lambda t: group.broadcast(t, 0)):
            tensor = whole.clone()
            start(tensor).wait()
            assert torch.equal(tensor, whole), (dtype, start)
        for gather in (group.all_gather, group.all_to_all, lambda out, t: group.all_to_all(out, t, [6], [6])):
            output = torch.zeros_like(whole)
            gather(output, whole).wait()
            assert torch.equal(output, whole), (dtype, gather)
    nothing = torch.zeros(0, device=device)
    group.all_to_all(nothing.clone(), nothing, [0], [0]).wait()


def test_an_aborted_group_leaves_the_process_to_form_another(device: torch.device) -> None:
    for _ in range(2):
        backend = backend_of_one(device)
        tensor = torch.ones(3, device=device)
        backend.allreduce([tensor]).wait()
        assert tensor.tolist() == [1.0, 1.0, 1.0]
        if device.type == "cuda":
            backend.abort()
