"""Step time of AdaptiveDataParallel against torch DDP, for 1, 2 and 4 ranks: CPU time and wall time.

Both train in the same processes in alternating blocks of steps, so that noise falls on both; the ratio of
each pair of neighbouring blocks is taken and the median of these ratios compared. CPU time is summed over all
ranks and threads. Bars: 1.01 x for ResNet-18 and the small transformer, 1.05 x for the
tiny MLP (1.08 x for four ranks) and for 300 small parameters.

``--whole`` adds, for two ranks, the wall time of a whole job on a Ray cluster: controller, allocator, heartbeats, an
automatic state every 5 s and a report every second are beside the steps, on the same cores.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from common import bar, finish, side_parser

WORLDS = (1, 2, 4)


# -- one rank ------------------------------------------------------------------------------------------------


def ddp_steps(case: Any, data: Any) -> Iterator[None]:
    """The plain loop under DDP; yields after each step."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    model = torch.nn.parallel.DistributedDataParallel(case.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=case.batch, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield
        epoch += 1


def elastic_steps(case: Any, data: Any, world: int) -> Iterator[None]:
    """The same loop with our two wrappers; yields after each step."""
    import torch

    import elastic_ray as er

    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=case.batch * world, drop_last=True)
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def run_rank(case_name: str, blocks: int) -> None:
    """Alternate blocks of both systems in this process; rank 0 prints the blocks' times as JSON."""
    import torch
    import torch.distributed as dist
    from step_models import CASES, ROWS

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    case = next(case for case in CASES if case.name == case_name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    data = torch.utils.data.TensorDataset(case.inputs(), torch.randint(10, (ROWS,)))
    systems = {"DDP": ddp_steps(case, data), "elastic-ray": elastic_steps(case, data, world)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for number in range(blocks + 1):
        order = list(systems) if number % 2 else list(reversed(systems))
        for name in order:
            wall, cpu = _timed_block(systems[name], case.block)
            if number:  # the first block of each warms up
                times[name].append((wall, cpu))
    if rank == 0:
        print("RESULT " + json.dumps(times), flush=True)
    dist.barrier()
    os._exit(0)  # in the middle of an epoch: nothing to finish


def _timed_block(steps: Iterator[None], count: int) -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(steps)
    # A rank that is done early does not wait in here: its CPU time ends before the others' end.
    used = torch.tensor([time.process_time() - cpu])
    dist.barrier()
    wall = time.perf_counter() - wall
    dist.all_reduce(used)
    return wall / count, used.item() / count


# -- all ranks -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Medians over the blocks of one case: seconds per step of DDP, and our multiple of it."""

    wall_s: float
    cpu_s: float
    wall_ratio: float
    cpu_ratio: float


def compare(case_name: str, *, world: int, blocks: int) -> Comparison:
    """Start the ranks as torchrun would, and compare block by block."""
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
    command = [sys.executable, __file__, "--rank-of", case_name, str(blocks)]
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
        output, _ = ranks[0].communicate(timeout=900)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{case_name}, {world} ranks: no result; output above and:\n{output}")
    times = json.loads(lines[-1].removeprefix("RESULT "))
    pairs = list(zip(times["DDP"], times["elastic-ray"], strict=True))
    return Comparison(
        wall_s=statistics.median(theirs[0] for theirs, _ in pairs),
        cpu_s=statistics.median(theirs[1] for theirs, _ in pairs),
        wall_ratio=statistics.median(ours[0] / theirs[0] for theirs, ours in pairs),
        cpu_ratio=statistics.median(ours[1] / theirs[1] for theirs, ours in pairs),
    )


def whole_job_loop(config: dict[str, Any]) -> list[float]:
    """The loop of a job; returns the wall time of a step in each block [s]."""
    import torch
    from step_models import CASES, ROWS

    import elastic_ray as er

    case = next(case for case in CASES if case.name == config["case"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model = er.AdaptiveDataParallel(model, optimizer)
    data = torch.utils.data.TensorDataset(case.inputs(), torch.randint(10, (ROWS,)))
    loader = er.AdaptiveDataLoader(data, batch_size=case.batch * 2, drop_last=True)
    blocks: list[float] = []
    steps, since_s, told_s = 0, time.perf_counter(), 0.0
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            now_s = time.perf_counter()
            if now_s - told_s > 1.0:
                told_s = now_s
                er.report({"step": steps})
            if steps % case.block == 0:
                blocks.append((now_s - since_s) / case.block)
                since_s = now_s
            if len(blocks) > config["blocks"]:
                break
        if len(blocks) > config["blocks"]:
            break
    return blocks[1:]  # the first warms up


def whole_job_s(case_name: str, blocks: int) -> float:
    """Median wall time of a step of a job of two workers [s]."""
    import ray.train
    from common import BUNDLE
    from scenarios import cluster

    import elastic_ray

    with cluster(nodes=1, slots=2), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        handle = elastic_ray.ElasticTrainer(
            whole_job_loop,
            train_loop_config={"case": case_name, "blocks": blocks},
            scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker=BUNDLE),
            run_config=ray.train.RunConfig(name="whole", storage_path=folder),
            elastic_config=elastic_ray.ElasticConfig(checkpoint_interval_s=5.0),
        ).submit()
        return statistics.median(handle.result(timeout=900.0).return_value)


def main() -> None:
    """Every model with every number of ranks."""
    from step_models import CASES

    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of ranks")
    parser.add_argument("--models", nargs="+", default=[case.name for case in CASES], help="models by name")
    parser.add_argument("--whole", action="store_true", help="whole jobs of two workers as well")
    options = parser.parse_args()
    rows, bars = [], []
    for case in (case for case in CASES if case.name in options.models):
        for world in options.worlds:
            blocks = max(3, case.blocks // 5) if options.quick else case.blocks
            result = compare(case.name, world=world, blocks=blocks)
            rows.append({"model": case.name, "ranks": world, **dataclasses.asdict(result)})
            limit = case.limit_of_four if world == 4 and case.limit_of_four else case.limit
            for kind, value in (("CPU", result.cpu_ratio), ("wall", result.wall_ratio)):
                claim = f"{case.name}, {world} ranks: {kind} time / DDP's"
                bars.append(bar(claim, value=value, limit=limit, at_least=False))
            print(f"  {case.name}, {world} ranks: CPU {result.cpu_ratio:.3f}, wall {result.wall_ratio:.3f}", flush=True)
            if options.whole and world == 2:
                took = whole_job_s(case.name, blocks) / result.wall_s
                rows[-1]["whole job, wall ratio"] = took
                print(f"  {case.name}, a whole job of 2 workers: wall {took:.3f}", flush=True)
    finish("step_time", rows=rows, bars=bars)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        run_rank(sys.argv[2], int(sys.argv[3]))
    else:
        main()
