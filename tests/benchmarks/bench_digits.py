"""Time to 97 % on scikit-learn's digits: an adaptive batch against the best of three fixed ones.

All rows run the same loop of elastic_ray, alone or with two ranks as under torchrun, with the same plain learning
rate: the user's. The fixed batches are 16, 64 and 256; the adaptive one begins at 16 and may go up to 256, with
AdaScale on the learning rate. What counts is the wall time spent in training, the tuner's fits included, the
evaluations left out, until the held-out 20 % are first classified right to 97 % at the end of an epoch. A run that
does not get there within the epochs or the time given counts with what it took, marked as not reached. Beside the
wall time stands rank 0's CPU time over the same spans, all threads: the steadier one on a machine that is shared.

Two nets, for they want different batches: of the MLP's steps most is overhead, so that larger batches are cheaper a
sample; the CNN computes, and on a CPU a sample costs it about the same in any batch. Bar: median time no longer than
that of the best fixed batch, which is known only afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from common import bar, finish, median, side_parser

FIXED = (16, 64, 256)
ADAPTIVE = 0
GOAL = 0.97
MOST_EPOCHS = 200
MOST_S = 40.0
RATE = {"mlp": 0.005, "cnn": 0.005}


# -- one rank ------------------------------------------------------------------------------------------------


def train(net: str, batch_size: int, seed: int) -> dict[str, Any]:
    """Train until the goal; ``batch_size`` 0 adapts from the smallest fixed one to the largest."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    training, images, labels = _digits()
    model = _build(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE[net], momentum=0.9)
    parallel = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(training, batch_size=batch_size or FIXED[0], seed=seed)
    if batch_size == ADAPTIVE:
        loader.autoscale_batch_size(max_batch_size=FIXED[-1])
    trained_s, cpu_s, accuracy, sizes = 0.0, 0.0, 0.0, []
    for _ in er.remaining_epochs_until(MOST_EPOCHS):
        begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
        trained_s += time.perf_counter() - begin_s
        cpu_s += time.process_time() - cpu_begin_s
        sizes += [loader.current_batch_size] if sizes[-1:] != [loader.current_batch_size] else []
        with torch.no_grad():
            accuracy = float((model(images).argmax(1) == labels).float().mean())
        if accuracy >= GOAL or _out_of_time(trained_s):
            break
    return {
        "time_s": trained_s,
        "cpu_s": cpu_s,
        "reached": accuracy >= GOAL,
        "epochs": min(er.current_epoch() + 1, MOST_EPOCHS),
        "steps": er.get_context().get_global_step(),
        "sizes": sizes,
    }


def _digits() -> tuple[Any, Any, Any]:
    """1437 digits to train on; images and labels of the 360 that are held out, in every run the same."""
    import torch
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[360:], order[:360]
    return torch.utils.data.TensorDataset(images[training], labels[training]), images[held_out], labels[held_out]


def _build(net: str) -> Any:
    """An MLP of 10 thousand parameters, or a CNN of 10 thousand that computes thirty times as much."""
    from torch import nn

    if net == "mlp":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def _out_of_time(trained_s: float) -> bool:
    """Whether any rank's time is over; all ranks answer alike."""
    import torch
    import torch.distributed as dist

    over = torch.tensor([float(trained_s > MOST_S)])
    if dist.is_initialized():
        dist.all_reduce(over)
    return bool(over.item() > 0)


def run_rank(net: str, batch_size: int, seed: int) -> None:
    """Train as one rank; rank 0 prints the result as JSON."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")  # for the benchmark's own agreement to stop
    result = train(net, batch_size, seed)
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(result), flush=True)


# -- all ranks -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one row; ``batch_size`` 0 = adaptive, ``sizes``: the batch at the ends of epochs, as it changed."""

    net: str
    workers: int
    batch_size: int
    seed: int
    time_s: float
    cpu_s: float
    reached: bool
    epochs: int
    steps: int
    sizes: tuple[int, ...]


def run(net: str, workers: int, batch_size: int, seed: int) -> Run:
    """A run in processes of its own, started as torchrun would where there are several."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent holds it
    shared = os.environ | {"OMP_NUM_THREADS": "1"}
    if workers > 1:
        shared |= {
            "WORLD_SIZE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    command = [sys.executable, __file__, "--rank-of", net, str(batch_size), str(seed)]
    ranks = []
    for rank in range(workers):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if workers > 1 else {}
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=shared | own, stdout=output, text=True))
    try:
        text, _ = ranks[0].communicate(timeout=300)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{net}, {workers} workers, batch {batch_size}, seed {seed}: no result; output:\n{text}")
    found = json.loads(lines[-1].removeprefix("RESULT "))
    found["sizes"] = tuple(found["sizes"])
    print(f"  {net}, {workers} workers, batch {batch_size or 'adaptive'}, seed {seed}: {found}", flush=True)
    return Run(net=net, workers=workers, batch_size=batch_size, seed=seed, **found)


def main() -> None:
    """All rows seed by seed, so that a slow spell falls on all of them."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--nets", nargs="+", choices=tuple(RATE), default=list(RATE))
    parser.add_argument("--workers", nargs="+", type=int, default=[1])
    parser.add_argument("--seeds", type=int, default=None, help="runs of each row, 5 unless --quick")
    options = parser.parse_args()
    if options.rank_of:
        net, batch_size, seed = options.rank_of
        run_rank(net, int(batch_size), int(seed))
        return
    seeds = options.seeds or (1 if options.quick else 5)
    groups = [(net, workers) for net in options.nets for workers in options.workers]
    runs = [run(*group, size, seed) for seed in range(seeds) for group in groups for size in (*FIXED, ADAPTIVE)]
    rows, bars = [], []
    for net, workers in groups:
        wall: dict[int, float] = {}
        cpu: dict[int, float] = {}
        for size in (*FIXED, ADAPTIVE):
            mine = [r for r in runs if (r.net, r.workers, r.batch_size) == (net, workers, size)]
            wall[size] = statistics.median(r.time_s for r in mine)
            cpu[size] = statistics.median(r.cpu_s for r in mine)
            rows.append(_row(net, workers, size, mine))
        for kind, medians in (("wall", wall), ("CPU", cpu)):
            best = min(FIXED, key=medians.__getitem__)
            claim = f"{net}, {workers} worker(s): {kind} time, adaptive / best fixed ({best})"
            bars.append(bar(claim, value=medians[ADAPTIVE] / medians[best], limit=1, at_least=False))
    finish("digits", rows=rows, bars=bars)


def _row(net: str, workers: int, size: int, runs: list[Run]) -> dict[str, Any]:
    return {
        "net": net,
        "workers": workers,
        "batch": "adaptive" if size == ADAPTIVE else str(size),
        "time to 97 % [s]": median(r.time_s for r in runs),
        "CPU [s]": median(r.cpu_s for r in runs),
        "shortest": min(r.time_s for r in runs),
        "longest": max(r.time_s for r in runs),
        "reached": f"{sum(r.reached for r in runs)} of {len(runs)}",
        "epochs": median(float(r.epochs) for r in runs),
        "steps": median(float(r.steps) for r in runs),
        "last batch": median(float(r.sizes[-1]) for r in runs),
    }


if __name__ == "__main__":
    main()
