"""Shard groups inside nodes against one group over all: step time, and what a node receives for it.

Two nodes, network namespaces with a link of 1 Gbit/s each, of two ranks each; 10.5 M parameters with SGD, gloo. In
alternating blocks in the same processes: `elastic_ray.fully_shard` with and without `shard_size=2`, and torch's own
`fully_shard` over all ranks and on a mesh of two by two (HSDP). Four ranks share two cores. Bars: at most a tenth
slower than torch's in both layouts; groups no slower than one.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

from bench_sync import launch
from common import bar, finish, side_parser
from network import Nodes, may_make_namespaces, namespaces

NODES, RANKS = 2, 4
OURS = {"fully_shard": None, "shard_size=2": 2}
THEIRS = {"torch": False, "torch, 2 x 2": True}
_WARM = 3  # a switched strategy lays its buckets out anew


def main() -> None:
    """All ranks, and what rank 0 has measured."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--rank-of", nargs="*", help="of a process that this benchmark starts itself")
    options = parser.parse_args()
    if options.rank_of is not None:
        _rank(*map(int, options.rank_of))
        return
    if not may_make_namespaces():
        raise SystemExit("this process may not make network namespaces")
    with namespaces(NODES) as made:
        network, arguments = Nodes(made.prefix), ["2", "2"] if options.quick else ["6", "4"]
        found = launch(network, RANKS, arguments, timeout_s=1500, script=__file__)
    rows = [
        {"layout": name, "step [s]": statistics.median(times), "node receives [MB a step]": statistics.median(received)}
        for name, (times, received) in found.items()
    ]
    steps = {row["layout"]: row["step [s]"] for row in rows}
    bars = [
        bar(f"step, {ours} / {theirs}", value=steps[ours] / steps[theirs], limit=1.1, at_least=False)
        for ours, theirs in zip(OURS, THEIRS, strict=True)
    ]
    gained = steps["fully_shard"] / steps["shard_size=2"]
    bars.append(bar("step, one group / groups of 2", value=gained, limit=1.0, at_least=True))
    finish("shard_groups", rows=rows, bars=bars)


# -- one rank --------------------------------------------------------------------------------------------------------


def _our_steps(data: Any, chosen: list[str]) -> Iterator[None]:
    """Train the model that is chosen; yields after each step."""
    import torch

    import elastic_ray as er

    models: dict[str, Any] = {}
    for name, shard_size in OURS.items():
        model = _sharded(lambda each, size=shard_size: er.fully_shard(each, shard_size=size))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        models[name] = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none"), optimizer
    loader = er.AdaptiveDataLoader(data, batch_size=8 * RANKS, drop_last=True)
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            model, optimizer = models[chosen[0]]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def _their_steps(data: Any, *, replicated: bool) -> Iterator[None]:
    """The same of torch; gradients are summed and divided, for gloo has no average."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((NODES, RANKS // NODES), ("replicate", "shard")) if replicated else ((RANKS,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def shard(each: Any) -> None:
        fully_shard(each, mesh=mesh)
        each.set_gradient_divide_factor(float(RANKS))
        each.set_force_sum_reduction_for_comms(True)

    model = _sharded(shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank())
    while True:
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def _sharded(shard: Any) -> Any:
    import torch
    from sync_cases import dense_mlp

    torch.manual_seed(0)
    model = dense_mlp()
    for each in model:
        if isinstance(each, torch.nn.Linear):
            shard(each)
    shard(model)
    return model


def _received_bytes() -> int:
    """By this node, over its link."""
    with open("/proc/net/dev") as lines:
        return sum(int(line.split(":")[1].split()[0]) for line in lines if ":" in line and "lo:" not in line)


def _rank(rounds: int, steps: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks share one dataset
    data = torch.utils.data.TensorDataset(torch.randn(2048, 1024), torch.randint(10, (2048,)))
    chosen = [next(iter(OURS))]
    ours = _our_steps(data, chosen)
    theirs = {name: _their_steps(data, replicated=replicated) for name, replicated in THEIRS.items()}
    measure({**dict.fromkeys(OURS, ours), **theirs}, chosen, rounds, steps)


def measure(steppers: Mapping[str, Iterator[None]], chosen: list[str], rounds: int, steps: int) -> None:
    """Time blocks of steps by turns, print what rank 0 has measured, and end the process.

    Args:
        steppers: by name; some may be one, which looks into ``chosen`` for the name whose turn it is.
    """
    import torch.distributed as dist

    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steppers}
    for number in range(rounds + 1):
        for name in list(found)[:: 1 if number % 2 else -1]:
            chosen[0] = name
            for _ in range(_WARM):
                next(steppers[name])
            dist.barrier()
            before, begin_s = _received_bytes(), time.perf_counter()
            for _ in range(steps):
                next(steppers[name])
            dist.barrier()
            if number:  # the first round warms up
                found[name][0].append((time.perf_counter() - begin_s) / steps)
                found[name][1].append((_received_bytes() - before) / steps / 1e6)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    os._exit(0)  # in the middle of an epoch: nothing to finish


if __name__ == "__main__":
    main()
