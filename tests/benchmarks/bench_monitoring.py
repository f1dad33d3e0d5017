"""Cost of monitoring inside the step, for 1, 2 and 4 ranks: CPU time and wall time against the same loop without.

All loops train in the same processes and take turns after each step, so that noise falls on all of them. In a round
each makes eight steps; their time is divided by that of the loop without monitoring, and the median of the rounds
counts. CPU time is summed over all ranks and threads. Four ranks take turns where there are two cores.

Bars: the noise scale in every step 1.01 x, the variance in every eighth step 1.02 x and in every step 1.10 x, for
ResNet-18 and the small transformer. The norms, and everything at once, are measured along, without a bar.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from common import bar, finish, side_parser

WORLDS = (1, 2, 4)
MODELS = ("ResNet-18", "transformer")
BLOCK = 8  # steps
WITHOUT = "without"
LIMITS = {"noise every step": 1.01, "variance every 8": 1.02, "variance every step": 1.10}


def monitors() -> dict[str, Any]:
    """What each loop asks for."""
    from elastic_ray.monitoring import Monitor

    return {
        WITHOUT: Monitor(),
        "noise every step": Monitor(noise_every=1),
        "variance every 8": Monitor(variance_every=8),
        "variance every step": Monitor(variance_every=1),
        "workers": Monitor(workers=True),
        "all every step": Monitor(noise_every=1, variance_every=1, norms_every=1, workers=True),
    }


# -- one rank ----------------------------------------------------------------------------------------------------------


def loop(case: Any, data: Any, world: int, monitor: Any) -> Iterator[Any]:
    """The loop with our two wrappers; yields its session before the first step, and after each step."""
    import torch

    import elastic_ray as er
    from elastic_ray.loop.api import current_session
    from elastic_ray.run.current import set_session

    set_session(None)
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model = er.AdaptiveDataParallel(model, optimizer, monitor=monitor)
    if monitor.noise_every is None:
        _without_noise(model)
    loader = er.AdaptiveDataLoader(data, batch_size=case.batch * world, drop_last=True)
    for _ in er.remaining_epochs_until(1_000_000):
        yield current_session()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield current_session()


def _without_noise(model: Any) -> None:
    """Have the model leave out the noise scale, which the job itself always measures."""
    tracker = model._statistics.noise
    measures = tracker.measures
    tracker.measures = lambda *args: measures(*args) and False


class Loop:
    """One of several loops of a process, each of which has a session of its own."""

    def __init__(self, *args: Any) -> None:
        self._steps = loop(*args)
        self._session = next(self._steps)

    def step(self) -> tuple[float, float]:
        """Wall time [s] and this rank's CPU time [s] of a step, which all ranks begin together."""
        import torch.distributed as dist

        from elastic_ray.run.current import set_session

        set_session(self._session)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        next(self._steps)
        # A rank that is done early does not wait in here: its CPU time ends before the others' end.
        used = time.process_time() - cpu
        dist.barrier()
        return time.perf_counter() - wall, used


def play_round(loops: list[Loop], first: int) -> list[tuple[float, float]]:
    """Of each loop, wall time of a step and CPU time of all ranks for it [s]; ``first`` is the loop to begin with."""
    import torch
    import torch.distributed as dist

    order = [(first + place) % len(loops) for place in range(len(loops))]
    sums = torch.zeros(len(loops), 2, dtype=torch.float64)
    for _ in range(BLOCK):
        for place in order:
            sums[place] += torch.tensor(loops[place].step(), dtype=torch.float64)
    walls = (sums[:, 0] / BLOCK).tolist()
    dist.all_reduce(sums)
    return list(zip(walls, (sums[:, 1] / BLOCK).tolist(), strict=True))


def run_rank(case_name: str, rounds: int) -> None:
    """Let all loops take turns in this process; rank 0 prints the rounds' times as JSON."""
    import torch
    import torch.distributed as dist
    from step_models import CASES, ROWS

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case = next(case for case in CASES if case.name == case_name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rows = ROWS // (BLOCK * case.batch * world) * (BLOCK * case.batch * world)  # whole blocks in each epoch
    data = torch.utils.data.TensorDataset(case.inputs()[:rows], torch.randint(10, (rows,)))
    loops = {name: Loop(case, data, world, monitor) for name, monitor in monitors().items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        found = play_round(list(loops.values()), number)
        for name, taken in zip(loops, found, strict=True):
            if number:  # the first round warms up
                times[name].append(taken)
    if rank == 0:
        print("RESULT " + json.dumps(times), flush=True)
    dist.barrier()
    os._exit(0)  # in the middle of an epoch: nothing to finish


# -- all ranks ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one kind of monitoring: medians over the rounds, and by how much they scatter.

    Attributes:
        wall_s: time of a step without [s].
        wall: wall time as a multiple of that without.
        cpu: CPU time likewise.
        cpu_error: standard error of that median, from the ratios' quartiles.
    """

    wall_s: float
    wall: float
    cpu: float
    cpu_error: float


def measure(case_name: str, *, world: int, rounds: int) -> dict[str, Cost]:
    """Start the ranks as torchrun would, and compare round by round."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent holds it
    shared = os.environ | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--rank-of", case_name, str(rounds)]
    ranks = [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=1800)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{case_name}, {world} ranks: no result; output above and:\n{output}")
    times = json.loads(lines[-1].removeprefix("RESULT "))
    return {name: _cost(times[WITHOUT], blocks) for name, blocks in times.items() if name != WITHOUT}


def _cost(without: list[list[float]], blocks: list[list[float]]) -> Cost:
    """Medians of the rounds' ratios."""
    walls = [ours[0] / theirs[0] for theirs, ours in zip(without, blocks, strict=True)]
    cpus = [ours[1] / theirs[1] for theirs, ours in zip(without, blocks, strict=True)]
    low, _, high = statistics.quantiles(cpus, n=4)
    return Cost(
        wall_s=statistics.median(wall for wall, _ in without),
        wall=statistics.median(walls),
        cpu=statistics.median(cpus),
        cpu_error=0.93 * (high - low) / len(cpus) ** 0.5,  # 1.25 sigma / sqrt(n), the quartiles being 1.35 sigma apart
    )


def main() -> None:
    """Every model with every number of ranks."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of ranks")
    parser.add_argument("--models", nargs="+", default=MODELS, help="models by name")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of eight steps of each loop")
    options = parser.parse_args()
    rows, bars = [], []
    for model in options.models:
        for world in options.worlds:
            costs = measure(model, world=world, rounds=4 if options.quick else options.rounds)
            for name, cost in costs.items():
                rows.append({"model": model, "ranks": world, "monitoring": name, **dataclasses.asdict(cost)})
                print(f"  {model}, {world} ranks, {name}: CPU {cost.cpu:.3f}, wall {cost.wall:.3f}", flush=True)
                for kind, value in (("CPU", cost.cpu), ("wall", cost.wall)) if name in LIMITS else ():
                    claim = f"{model}, {world} ranks, {name}: {kind} time / without"
                    bars.append(bar(claim, value=value, limit=LIMITS[name], at_least=False))
    finish("monitoring", rows=rows, bars=bars)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        run_rank(sys.argv[2], int(sys.argv[3]))
    else:
        main()
