"""Pause at a planned resize 1 -> 2 -> 4 -> 3, against Ray Train's elastic mode: nodes come, and one is drained.

Bars: 30 x shorter, and at most two steps' time plus the broadcast of the state (200 MB, measured in the same
run).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

from common import arguments, bar, build_model, finish, median, ratio
from elastic_side import ElasticJob
from ray_train_baseline import RayTrainJob
from scenarios import Outcome, pauses, resize, run_sides

SIDES = (("ray-train", RayTrainJob), ("elastic-ray", ElasticJob))
EVENTS = {"1->2": 2, "2->4": 4, "4->3": 3}


def main() -> None:
    """Both sides in turns, the broadcast after them; medians are compared, the worst event counts."""
    options = arguments(__doc__ or "")
    sides = [(side, functools.partial(resize, kind)) for side, kind in SIDES]
    outcomes = run_sides(sides, wanted=options.side, repeats=options.repeats)
    rows, ratios, excesses = [], [], []
    for event, world in EVENTS.items():
        theirs = median(pauses(outcomes, RayTrainJob.name, event))
        ours = median(pauses(outcomes, ElasticJob.name, event))
        budget = _budget(outcomes, event, world)
        times = ratio(theirs, ours)
        rows.append(
            {
                "event": event,
                "Ray Train [s]": theirs,
                "elastic-ray [s]": ours,
                "ratio": times,
                "budget [s]": budget,
            }
        )
        ratios.extend([] if times is None else [times])
        excesses.extend([] if ours is None or budget is None else [ours / budget])
    least = "pause at a planned resize, times shorter than Ray Train's: the least of 1 -> 2 -> 4 -> 3"
    excess = "pause at a planned resize over two steps and the broadcast of the state"
    bars = [
        bar(least, value=min(ratios, default=None), limit=30, at_least=True),
        bar(excess, value=max(excesses, default=None), limit=1, at_least=False),
    ]
    finish("resize: every event", rows=[outcome.row() for outcome in outcomes], bars=[])
    finish("resize", rows=rows, bars=bars)


def _budget(outcomes: list[Outcome], event: str, world: int) -> float | None:
    steps = [o.pause.step_s for o in outcomes if o.system == ElasticJob.name and o.event == event]
    return 2 * statistics.median(steps) + broadcast_s(world) if steps else None


def broadcast_s(world: int) -> float:
    """Median time of broadcasting model and momentum over gloo among ``world`` processes [s]."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    times: Any = context.Queue()
    ranks = [context.Process(target=_broadcast, args=(rank, world, port, times)) for rank in range(world)]
    for process in ranks:
        process.start()
    result = times.get(timeout=120)
    for process in ranks:
        process.join()
    return float(result)


def _broadcast(rank: int, world: int, port: int, times: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    size = 2 * sum(parameter.numel() for parameter in build_model().parameters())
    state = torch.zeros(size)
    took = []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        dist.broadcast(state, 0)
        dist.barrier()
        took.append(time.perf_counter() - begin)
    if rank == 0:
        times.put(statistics.median(took))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
