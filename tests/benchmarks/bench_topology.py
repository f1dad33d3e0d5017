"""Ways of an all-reduce between two nodes of two ranks each: step time, and what a node receives for it.

Nodes are network namespaces with a link of 1 Gbit/s each; 10.5 M parameters with SGD, gloo. One model is switched from
topology to topology in alternating blocks, torch DDP beside it. Four ranks share two cores. Bar: ``two_level`` takes at
most 0.6 x the time of the flat reduction.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench_shard_groups import NODES, RANKS, measure
from bench_sync import launch
from common import bar, finish, side_parser
from network import Nodes, may_make_namespaces, namespaces

WAYS = ("all_reduce", "two_level", "ring", "tree", "star")
DDP = "torch DDP"


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
        arguments = ["2", "3"] if options.quick else ["6", "4"]
        found = launch(Nodes(made.prefix), RANKS, arguments, timeout_s=1500, script=__file__)
    rows = [
        {
            "topology": name,
            "step [s]": statistics.median(times),
            "node receives [MB a step]": statistics.median(received),
        }
        for name, (times, received) in found.items()
    ]
    steps = {row["topology"]: row["step [s]"] for row in rows}
    bars = [
        bar(f"step, two_level / {flat}", value=steps["two_level"] / steps[flat], limit=0.6, at_least=False)
        for flat in ("all_reduce", DDP)
    ]
    finish("topology", rows=rows, bars=bars)


# -- one rank --------------------------------------------------------------------------------------------------------


def _our_steps(data: Any, chosen: list[str]) -> Iterator[None]:
    """Train under the topology that is chosen; yields after each step."""
    import torch
    from sync_cases import dense_mlp

    import elastic_ray as er

    torch.manual_seed(0)
    module = dense_mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model, present = er.AdaptiveDataParallel(module, optimizer, scaling_rule="none"), WAYS[0]
    loader = er.AdaptiveDataLoader(data, batch_size=8 * RANKS, drop_last=True)
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            if chosen[0] != present:
                present = chosen[0]
                model.set_strategy(present)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def _their_steps(data: Any) -> Iterator[None]:
    """The same of torch DDP."""
    import torch
    import torch.distributed as dist
    from sync_cases import dense_mlp

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(dense_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank())
    while True:
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def _rank(rounds: int, steps: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks share one dataset
    data = torch.utils.data.TensorDataset(torch.randn(2048, 1024), torch.randint(10, (2048,)))
    chosen = [WAYS[0]]
    ours, theirs = _our_steps(data, chosen), _their_steps(data)
    measure({**dict.fromkeys(WAYS, ours), DDP: theirs}, chosen, rounds, steps)


if __name__ == "__main__":
    main()
