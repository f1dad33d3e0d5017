"""Topologies of an all-reduce between two nodes of two ranks each: step times, and what a policy does on a slow link.

Nodes are network namespaces with a link of 1 Gbit/s and 5 ms one way between them; gloo; four ranks share two cores.

``--part ways``: models of 1.6 to 42 MB with SGD. One model is switched from topology to topology in alternating blocks,
torch DDP and the same steps without any reduction beside it. A reduction's time is what a step takes longer than those.
Bars: ``two_level`` takes at most 0.6 x the time of the flat reduction and DDP's; the flat one at most 1.1 x DDP's.

``--part slow``: 1.3 M parameters under ``Interference``, whose choices are topologies. At a step the link slows to a
tenth; later every topology runs in turn. Bar: within ten steps the speed is 0.9 x that of the best one, and stays so.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench_shard_groups import NODES, RANKS, measure
from bench_sync import launch
from common import bar, finish, side_parser
from network import Nodes, change_rate, far_namespaces, may_make_namespaces

WAYS = ("all_reduce", "two_level", "ring", "tree", "star")
DDP, ALONE = "torch DDP", "no reduction"
# [MB]: width and number of layers, and rounds, for short steps vary most
SIZES = {"1.6": (320, 4, 12), "4.2": (512, 4, 12), "12.6": (1024, 3, 8), "42": (1871, 3, 4)}
DELAY_S = 0.005
FREE_STEPS, WINDOW = 15, 5
CHOICES = {"two choices": (WAYS[:2], 25), "five choices": (WAYS, 50)}  # and steps on the slow link


def main() -> None:
    """All ranks, and what rank 0 has measured."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--part", choices=("ways", "slow"), help="only this part")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of models [MB], of ways")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="topologies to measure, such as 'ring of 4 MiB'")
    parser.add_argument("--rank-of", nargs="*", help="of a process that this benchmark starts itself")
    options = parser.parse_args()
    if options.rank_of is not None:
        part, *rest = options.rank_of
        (_rank_of_ways if part == "ways" else _rank_of_slow)(*rest)
        return
    if not may_make_namespaces():
        raise SystemExit("this process may not make network namespaces")
    rows: dict[str, list[dict[str, Any]]] = {}
    bars = []
    if options.part in (None, "ways"):
        rows["ways"] = []
        for size in options.sizes:
            made, found = _ways(size, options.ways, quick=options.quick)
            rows["ways"] += made
            bars += found
    if options.part in (None, "slow"):
        rows["slow"], found = _slow(quick=options.quick)
        bars += found
    for part, each in rows.items():
        finish(f"topology, {part}", rows=each, bars=bars if part == list(rows)[-1] else [])


def _launch(*arguments: str) -> dict[str, Any]:
    with far_namespaces(NODES, delay_s=DELAY_S) as made:
        return launch(Nodes(made.prefix), RANKS, arguments, timeout_s=1500, script=__file__)


def _ways(size: str, ways: Sequence[str], *, quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and bars of fixed topologies for a model of some size."""
    found = _launch("ways", size, "2" if quick else str(SIZES[size][2]), *ways)
    alone = statistics.median(found[ALONE][0])
    rows = [
        {
            "model [MB]": float(size),
            "topology": name,
            "step [s]": statistics.median(times),
            "reduction [s]": statistics.median(times) - alone,
            "node receives [MB a step]": statistics.median(received),
        }
        for name, (times, received) in found.items()
    ]
    took = {row["topology"]: row["reduction [s]"] for row in rows}
    where = "reduction between two nodes of two ranks, 1 Gbit/s and 5 ms"
    compared = [("two_level", "all_reduce", 0.6), ("two_level", DDP, 0.6), ("all_reduce", DDP, 1.1)]
    return rows, [
        bar(f"{where}, {size} MB: {one} / {other}", value=took[one] / took[other], limit=limit, at_least=False)
        for one, other, limit in compared
        if one in took and other in took
    ]


def _slow(*, quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and bars of a link that slows to a tenth."""
    rows, bars = [], []
    for choices in list(CHOICES)[: 1 if quick else None]:
        found = _launch("slow", choices)
        times = found["times"]
        fixed = {name: statistics.median(each) for name, each in found["blocks"].items()}
        best_s, free_s = min(fixed.values()), statistics.median(times[5:FREE_STEPS])
        slow = times[FREE_STEPS:]
        medians = [statistics.median(slow[at : at + WINDOW]) for at in range(len(slow) - WINDOW + 1)]
        recovered = next((at for at in range(len(medians), 0, -1) if medians[at - 1] > best_s / 0.9), 0)
        recovered += WINDOW // 2  # up to the middle of the five
        rows += [
            {
                "choices": choices,
                "link": "free",
                "topology": WAYS[0],
                "step [s]": free_s,
            },
            *({"choices": choices, "link": "a tenth", "topology": name, "step [s]": s} for name, s in fixed.items()),
            {"choices": choices, "link": "a tenth", "topology": f"{found['kept']}, kept", "step [s]": medians[-1]},
        ]
        print(f"{choices}: steps [s] on the slow link {[round(each, 2) for each in slow]}; asked {found['asked']}")
        among = f"link slows to a tenth, Interference with {choices}"
        bars += [
            bar(f"{among}: steps until 0.9 x the best speed", value=recovered, limit=10, at_least=False),
            bar(f"{among}: speed kept / best topology's", value=best_s / medians[-1], limit=0.9, at_least=True),
        ]
    return rows, bars


# -- one rank --------------------------------------------------------------------------------------------------------


def _model(size: str) -> Any:
    """Return layers of equal width, and a small last one."""
    import torch

    torch.manual_seed(0)
    width, layers, _ = SIZES[size]
    deep = [each for _ in range(layers) for each in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*deep, torch.nn.Linear(width, 10))


def _strategy(name: str) -> Any:
    """Return the strategy of a name such as "ring", or "ring of 4 MiB"."""
    from elastic_ray.sync import AllReduce

    topology, _, size = name.partition(" of ")
    if not size:
        return name
    native = topology == "all_reduce"
    return AllReduce(topology="native" if native else topology, bucket_bytes=int(float(size.split()[0]) * 2**20))


def _our_steps(data: Any, chosen: list[str], size: str) -> Iterator[None]:
    """Train under the topology that is chosen; yields after each step."""
    import torch

    import elastic_ray as er

    module = _model(size)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model, present = er.AdaptiveDataParallel(module, optimizer, scaling_rule="none"), WAYS[0]
    loader = er.AdaptiveDataLoader(data, batch_size=8 * RANKS, drop_last=True)
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            if chosen[0] != present:
                present = chosen[0]
                model.set_strategy(_strategy(present))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def _their_steps(data: Any, size: str, *, reduces: bool) -> Iterator[None]:
    """The same of torch DDP."""
    import torch
    import torch.distributed as dist

    model = torch.nn.parallel.DistributedDataParallel(_model(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank())
    while True:
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, drop_last=True):
            with contextlib.nullcontext() if reduces else model.no_sync():
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            yield


def _start() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks share one dataset


def _rank_of_ways(size: str, rounds: str, *ways: str) -> None:
    import torch

    _start()
    data = torch.utils.data.TensorDataset(torch.randn(2048, SIZES[size][0]), torch.randint(10, (2048,)))
    chosen = [WAYS[0]]
    ours = _our_steps(data, chosen, size)
    theirs = {DDP: _their_steps(data, size, reduces=True), ALONE: _their_steps(data, size, reduces=False)}
    measure({**dict.fromkeys(ways, ours), **theirs}, chosen, int(rounds), 4)


def _rank_of_slow(choices: str) -> None:
    """Steps on a free link, on a slow one, then under each topology by turns; rank 0 prints what it found."""
    import torch
    import torch.distributed as dist

    import elastic_ray as er
    from elastic_ray.adaptation import Interference, PolicyView, SetStrategy
    from elastic_ray.adaptation.policy import Answer

    asked: list[tuple[int, Any]] = []
    names, slow_steps = CHOICES[choices]

    class Noticing(Interference):
        """Interference that writes down what it asks for, and asks for nothing before the link slows."""

        def after_step(self, view: PolicyView) -> Answer:
            self.threshold = 0.8 if view.step >= FREE_STEPS else 0.01
            answer = super().after_step(view) if view.step < FREE_STEPS + slow_steps else None
            if isinstance(answer, SetStrategy):
                asked.append((view.step - FREE_STEPS, answer.strategy))
            return answer

    _start()
    module = torch.nn.Sequential(torch.nn.Linear(512, 1280), torch.nn.ReLU(), torch.nn.Linear(1280, 512))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    policy = Noticing(names, window=WINDOW)
    model = er.AdaptiveDataParallel(module, optimizer, policy=policy, scaling_rule="none")
    data = torch.utils.data.TensorDataset(torch.randn(64, 512).repeat(50, 1))
    times: list[float] = []

    def steps() -> Iterator[None]:
        for _ in er.remaining_epochs_until(1_000_000):
            for (x,) in er.AdaptiveDataLoader(data, batch_size=16, drop_last=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                yield

    def timed() -> float:
        since_s = time.perf_counter()
        next(running)
        return time.perf_counter() - since_s

    running = steps()
    for step in range(FREE_STEPS + slow_steps):
        if step == FREE_STEPS and os.environ["LOCAL_RANK"] == "0":
            change_rate(os.environ["GLOO_SOCKET_IFNAME"], "100mbit")
        times.append(timed())
    kept = model.strategy.name
    blocks: dict[str, list[float]] = {}
    for name in WAYS:
        model.set_strategy(name)
        for _ in range(3):  # until the switch counts
            next(running)
        blocks[name] = [timed() for _ in range(4)]
    if dist.get_rank() == 0:
        result = {"times": times, "kept": kept, "asked": asked, "blocks": blocks}
        print("RESULT " + json.dumps(result), flush=True)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    os._exit(0)  # in the middle of an epoch: nothing to finish


if __name__ == "__main__":
    main()
