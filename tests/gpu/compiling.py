"""How long a joiner's first compiled step takes beside that of the first worker: a job of processes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import elastic_ray as er
from tests.gpu.processes import ProcessJob, asked_to_finish
from tests.membership.groups import local_controller
from tests.sync.sharded_parameters.sharded import BATCH, Net, data

HITS, MISSES = "fxgraph_cache_hit", "fxgraph_cache_miss"


def train(device_name: str) -> dict[str, Any]:
    """Train with a compiled model until some rank is asked to finish; return how its first step went, on each rank."""
    from torch._dynamo.utils import counters

    device = torch.device(device_name)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(er.AdaptiveDataParallel(model, optimizer, scaling_rule="none"), dynamic=True)
    first_s = 0.0
    for _ in er.remaining_epochs_until(10**6):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3):
            begin_s = time.monotonic()
            optimizer.zero_grad()
            nn.functional.cross_entropy(compiled(x.to(device)), y.to(device)).backward()
            first_s = first_s or time.monotonic() - begin_s
            optimizer.step()
        if er.all_reduce(int(asked_to_finish())):
            break
    return {"first_s": first_s, HITS: counters["inductor"][HITS], MISSES: counters["inductor"][MISSES]}


def first_steps(device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a worker that compiles, and of one on the same node that joins it afterwards."""
    with local_controller() as controller:
        job = ProcessJob(controller, train, (device,), gpu=device == "cuda", silent_s=120.0)
        try:
            first, second = job.start(1), job.start(2)
            job.wait(lambda: first.ready.is_set() and second.ready.is_set(), 120.0, "start")
            job.announce((1,), void=False)
            job.wait(lambda: bool(first.over) or len(first.steps) > 2, 240.0, "a compiled step")
            job.announce((1, 2), void=False)
            job.wait(lambda: bool(first.over or second.over) or len(second.steps) > 2, 240.0, "one of the joiner")
            job.finish()
            job.wait(lambda: bool(first.over and second.over), 120.0, "the end")
            if (first.over, second.over) != ("done", "done"):
                raise RuntimeError(f"the workers end otherwise: {first.over}; {second.over}")
            return first.result, second.result
        finally:
            job.close()


def main() -> None:
    """Print both."""
    cold, joiner = first_steps("cuda")
    print(f"compiled: cold {cold}, joiner {joiner}", flush=True)
