"""Ways of synchronising gradients against torch DDP, on loopback, over links of 1 Gbit/s, and between two nodes.

All train in the same processes in alternating blocks of steps: DDP, DDP with sparse gradients where there are tables,
and one AdaptiveDataParallel that is switched from strategy to strategy, first by ``strategy="auto"``. Links of
1 Gbit/s are network namespaces that this script makes where it may; else these cells are left out. Two nodes have two
ranks each. Four ranks on two cores are slowed by each other. ``--auto`` is the choice alone: six cells of two models,
against every exact strategy by name.

Accuracy with large batches is measured by ``sync_accuracy.py``. A slow rank is not measured: every step ends with a
vote of all ranks, under averaging strategies too, so none gets ahead of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import bar, finish, side_parser
from network import Loopback, Network, Nodes, may_make_namespaces, namespaces

CHOOSING_STEPS = 60  # more than the automatic choice takes
WARM = 2
LINKS = ("loopback", "1gbit", "nodes")
_PORT = 29471


# -- one rank ------------------------------------------------------------------------------------------------


def ddp_steps(case: Any, data: Any, *, sparse: bool) -> Iterator[None]:
    """The plain loop under DDP; yields after each step."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(case.build(sparse))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=case.momentum)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=case.batch, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            case.loss(model(x), y).backward()
            optimizer.step()
            yield
        epoch += 1


class Elastic:
    """The same loop with our two wrappers, under strategies that change."""

    def __init__(self, case: Any, data: Any, world: int) -> None:
        import torch

        import elastic_ray as er

        torch.manual_seed(0)
        model = case.build(case.tables)
        self._case, self._data, self._world = case, data, world
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=case.momentum)
        self.model = er.AdaptiveDataParallel(model, self._optimizer, strategy="auto")

    def steps(self) -> Iterator[None]:
        """Yields after each step."""
        import elastic_ray as er

        loader = er.AdaptiveDataLoader(self._data, batch_size=self._case.batch * self._world, drop_last=True)
        for _ in er.remaining_epochs_until(1_000_000):
            for x, y in loader:
                self._optimizer.zero_grad()
                self._case.loss(self.model(x), y).backward()
                self._optimizer.step()
                yield


def run_rank(case_name: str, rounds: int, steps: int, auto_alone: str) -> None:
    """Let the automatic choice be made, then alternate blocks of everything; rank 0 prints times as JSON."""
    import torch
    import torch.distributed as dist
    from sync_cases import CASES

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case = next(case for case in CASES if case.name == case_name)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = torch.utils.data.TensorDataset(case.inputs(), case.targets())
    elastic = Elastic(case, data, world)
    ours = elastic.steps()
    spent = 0
    while spent < CHOOSING_STEPS and not any(row.chosen for row in elastic.model.explain_strategy().candidates):
        next(ours)  # all ranks choose in the same step
        spent += 1
    next(ours)  # takes it up
    chosen, table = elastic.model.strategy, str(elastic.model.explain_strategy())
    names = (*case.exact, *case.routed) if auto_alone else (*case.exact, *case.other)
    strategies: dict[str, Any] = {name: name for name in names}
    if not auto_alone or chosen.name not in names:
        strategies["auto"] = chosen
    theirs = {} if auto_alone else {"DDP": ddp_steps(case, data, sparse=False)}
    if case.tables and not auto_alone:
        theirs["DDP sparse"] = ddp_steps(case, data, sparse=True)
    times: dict[str, list[float]] = {name: [] for name in (*theirs, *strategies)}
    switches: list[float] = []
    for number in range(rounds + 1):
        for name in list(times) if number % 2 else list(reversed(times)):
            if name in strategies:
                elastic.model.set_strategy(strategies[name])
                switches.append(timed(ours, 1))
            stepper = ours if name in strategies else theirs[name]
            timed(stepper, 1 if auto_alone else WARM)
            took = [timed(stepper, 1) for _ in range(steps)] if auto_alone else [timed(stepper, steps)]
            if number:  # the first round warms up
                times[name] += took
    if rank == 0:
        print(table, file=sys.stderr)
        result = {"times": times, "chosen": chosen.name, "spent": spent, "switch": switches[len(strategies) :]}
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # in the middle of an epoch: nothing to finish


def timed(steps: Iterator[None], count: int) -> float:
    """Seconds per step of the slowest rank."""
    import torch.distributed as dist

    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(count):
        next(steps)
    dist.barrier()
    return (time.perf_counter() - begin_s) / count


# -- all ranks -----------------------------------------------------------------------------------------------


def hold_store(address: str) -> None:
    """Be torchrun's agent: hold the store in which the ranks meet, until this process is killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(address, _PORT, is_master=True, wait_for_workers=False)
    print(f"store at port {store.port}", flush=True)
    time.sleep(1e6)


def launch(
    network: Network, world: int, arguments: Sequence[str], *, timeout_s: float, script: str = __file__
) -> dict[str, Any]:
    """Start the ranks of a script as torchrun would; what rank 0 has printed."""
    serve = (
        "import sys,time,torch.distributed as d; s=d.TCPStore(sys.argv[1],29471,is_master=True,wait_for_workers=False)"
    )
    store = subprocess.Popen(
        network.command(
            0, [sys.executable, "-c", f"{serve}; print('up', flush=True); time.sleep(1e6)", network.address(0)]
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert store.stdout is not None
    store.stdout.readline()
    shared = os.environ | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(network.ranks_on_a_node or world),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(_PORT),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(world):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank % (network.ranks_on_a_node or world))}
        command = network.command(rank, [sys.executable, script, "--rank-of", *arguments])
        environment = shared | mine | {"GLOO_SOCKET_IFNAME": network.interface(rank)}
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
    try:
        output, _ = ranks[0].communicate(timeout=timeout_s)
    finally:
        for process in (*ranks, store):
            process.kill()
            process.wait()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]  # type: ignore[attr-defined]
    if not lines:
        raise RuntimeError(f"{arguments}, {world} ranks, {network.name}: no result; output above and:\n{output}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model, link and number of ranks: what was measured [s per step]."""

    model: str
    link: str
    ranks: int
    times: dict[str, list[float]]
    chosen: str
    spent: int
    switch: list[float]
    exact: tuple[str, ...]
    single_steps: bool

    def speed_up(self, name: str, over: str = "DDP") -> float:
        """Median over neighbouring blocks of how many times shorter its step is."""
        return statistics.median(b / a for a, b in zip(self.times[name], self.times[over], strict=True))

    @property
    def best(self) -> str:
        """The fastest exact strategy by hand."""
        return min(self.exact, key=self.step_s)

    def step_s(self, name: str) -> float:
        """A step's time; of single steps the fastest fifth, for whatever else a machine does makes them longer."""
        times = self.times[name]
        return statistics.quantiles(times, n=5)[0] if self.single_steps else statistics.median(times)

    @property
    def regret(self) -> float:
        """How much slower the chosen strategy is than that, as a share."""
        return self.step_s("auto" if "auto" in self.times else self.chosen) / self.step_s(self.best) - 1.0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each way."""
        for name in self.times:
            yield {
                "model": self.model,
                "link": self.link,
                "ranks": self.ranks,
                "strategy": f"auto: {self.chosen}" if name == "auto" else name,
                "step_s": self.step_s(name),
                "x DDP": self.speed_up(name) if "DDP" in self.times else None,
            }


def matrix(options: Any) -> list[Cell]:
    """Every cell."""
    from sync_cases import CASES

    cells = []
    for world in options.worlds:
        for link in options.links:
            if link != "loopback" and not may_make_namespaces():
                print("  links of 1 Gbit/s are left out: this process may not make network namespaces")
                continue
            for case in (each for each in CASES if each.name in options.models and not (options.auto and each.tables)):
                if (link == "nodes") != (world == 4) and (options.auto or link == "nodes"):
                    continue
                cells.append(measure(case, link, world, quick=options.quick, auto_alone=options.auto))
                print("\n".join(f"  {row}" for row in cells[-1].rows()), flush=True)
    return cells


def measure(case: Any, link: str, world: int, *, quick: bool, auto_alone: bool) -> Cell:
    """One cell."""
    rounds, steps = (2, 2) if quick else (5, case.steps if link == "loopback" else max(2, case.steps // 2))
    if auto_alone:
        rounds, steps = (3, 2) if quick else (10, 3)
    arguments = [case.name, str(rounds), str(steps), "auto" if auto_alone else ""]
    if link == "loopback":
        result = launch(Loopback(), world, arguments, timeout_s=1800)
    else:
        with namespaces(world if link == "1gbit" else 2) as made:
            network = made if link == "1gbit" else Nodes(made.prefix)
            result = launch(network, world, arguments, timeout_s=3600)
    exact = tuple(name for name in (*case.exact, *case.routed) if name in result["times"])
    return Cell(model=case.name, link=link, ranks=world, exact=exact, single_steps=auto_alone, **result)


def auto_bars(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The claims of the choice, cell by cell."""
    bars = []
    for cell in cells:
        where = f"race, {cell.model}, {cell.link}, {cell.ranks} ranks"
        value = 1 + cell.regret
        bars.append(bar(f"{where}: chosen over the best by hand", value=value, limit=1.05, at_least=False))
        if cell.link != "nodes":  # how far off the measurement is: both are the same there
            same = max(ratio := cell.step_s("two_level") / cell.step_s("all_reduce"), 1 / ratio)
            bars.append(bar(f"{where}: all_reduce over itself", value=same, limit=1.05, at_least=False))
        bars.append(bar(f"{where}: steps spent", value=cell.spent, limit=40, at_least=False))
    return bars


def bars_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The claims."""
    bars = []
    limits = {("loopback", 2): 8.0, ("loopback", 4): 6.0, ("1gbit", 2): 25.0, ("1gbit", 4): 15.0}
    for cell in cells:
        where = f"{cell.model}, {cell.link}, {cell.ranks} ranks"
        if cell.model == "embedding":
            limit = limits[cell.link, cell.ranks]
            bars.append(bar(f"{where}: auto x DDP", value=cell.speed_up("auto"), limit=limit, at_least=True))
            value = cell.speed_up("auto", "DDP sparse")
            bars.append(bar(f"{where}: auto x DDP sparse", value=value, limit=0.9, at_least=True))
        elif cell.link == "loopback":
            value = cell.speed_up("all_reduce")
            bars.append(bar(f"{where}: default engine x DDP", value=value, limit=0.97, at_least=True))
        elif cell.model == "mlp":
            bars.append(bar(f"{where}: bf16 x DDP", value=cell.speed_up("bf16"), limit=1.5, at_least=True))
            bars.append(bar(f"{where}: powersgd x DDP", value=cell.speed_up("powersgd"), limit=3.0, at_least=True))
        step_s = max(statistics.median(cell.times[name]) for name in cell.exact)
        longest = max(cell.switch) if cell.switch else None
        bars.append(bar(f"{where}: a switch, in steps", value=longest and longest / step_s, limit=2.0, at_least=False))
    slow = "one of four ranks slowed 4 x: steps of the others, pair averaging or local SGD x all-reduce"
    bars.append(bar(slow, value=None, limit=2.5, at_least=True))
    if cells:
        near = sum(cell.regret <= 0.05 for cell in cells) / len(cells)
        bars.append(bar("auto within 5 % of the best by hand, share of cells", value=near, limit=0.9, at_least=True))
        slowest = min(cell.speed_up("auto") for cell in cells)
        bars.append(bar("auto x DDP, the worst cell", value=slowest, limit=0.95, at_least=True))
    return bars


def main() -> None:
    """The parts that are asked for."""
    from sync_cases import CASES

    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--worlds", type=int, nargs="+", default=(2, 4), help="numbers of ranks")
    parser.add_argument("--models", nargs="+", default=[case.name for case in CASES], help="models by name")
    parser.add_argument("--links", nargs="+", default=LINKS, choices=LINKS)
    parser.add_argument("--auto", action="store_true", help="the automatic choice alone")
    options = parser.parse_args()
    cells = matrix(options)
    bars = auto_bars(cells) if options.auto else bars_of(cells)
    finish("sync", rows=[row for cell in cells for row in cell.rows()], bars=bars)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        run_rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    elif sys.argv[1:2] == ["--hold-store"]:
        hold_store(sys.argv[2])
    else:
        main()
