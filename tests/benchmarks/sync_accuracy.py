"""Accuracy on scikit-learn's digits with a batch that is too large: gradients are reduced, or models averaged.

KungFu's claim for its SMA (OSDI 2020, section 6): where the batch is large, and its rate scaled with it, synchronous
SGD loses accuracy, and averaged models keep it. The small batch of 16 has a rate of 0.0875; by the linear rule (Goyal
et al. 2017) a batch of 256 has 1.4. Four ranks share each batch; all rows have the same net, epochs and seeds. A second
group of rows has half that rate, the best one for all-reduce among 0.7, 1.0 and 1.4: it tells what averaging is worth
where somebody has tuned the rate. Accuracy is that of the one model at the end on the held-out 20 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from common import bar, finish, side_parser

RANKS = 4
EPOCHS = 20
SMALL, LARGE = 16, 256
SMALL_RATE = 0.0875
SCALED_RATE = SMALL_RATE * LARGE / SMALL
TUNED_RATE = SCALED_RATE / 2
STRATEGIES = ("all_reduce", "sma", "pair", "local_sgd")
ROWS = (
    *((strategy, LARGE, SCALED_RATE) for strategy in STRATEGIES),
    *((strategy, LARGE, TUNED_RATE) for strategy in STRATEGIES),
)

# -- one rank ------------------------------------------------------------------------------------------------


def train(strategy: str, batch_size: int, rate: float, seed: int) -> float:
    """Accuracy at the end, 0 where the model is not finite."""
    import torch
    from sklearn.datasets import load_digits

    import elastic_ray as er

    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[360:], order[:360]
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    parallel = er.AdaptiveDataParallel(model, optimizer, strategy=strategy, scaling_rule="none", nonfinite="ignore")
    data = torch.utils.data.TensorDataset(images[training], labels[training])
    loader = er.AdaptiveDataLoader(data, batch_size=batch_size, seed=seed)
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        scores = model(images[held_out])
    return float((scores.argmax(1) == labels[held_out]).float().mean()) if bool(scores.isfinite().all()) else 0.0


def run_rank(seeds: int) -> None:
    """All rows seed by seed; rank 0 prints them as JSON."""
    import torch

    torch.set_num_threads(1)
    found = [[train(*row, seed) for seed in range(seeds)] for row in ROWS]
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps(found), flush=True)


# -- all ranks -----------------------------------------------------------------------------------------------


def accuracies(seeds: int) -> dict[tuple[str, int, float], list[float]]:
    """Accuracy of each row by seed, from ranks that are started as torchrun would."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent holds it
    shared = os.environ | {
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--rank-of", str(seeds)]
    ranks = []
    for rank in range(RANKS):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=shared | own, stdout=output, text=True))
    try:
        text, _ = ranks[0].communicate(timeout=1200)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"no result; output:\n{text}")
    small = ("all_reduce", SMALL, SMALL_RATE)  # by one process: the gradient of a batch is that of its parts
    found = dict(zip(ROWS, json.loads(lines[-1].removeprefix("RESULT ")), strict=True))
    return {small: [train(*small, seed) for seed in range(seeds)], **found}


def bars_of(found: Mapping[tuple[str, int, float], Sequence[float]]) -> list[dict[str, Any]]:
    """The claim: at the scaled rate averaged models are more accurate than all-reduce, in the mean over seeds."""
    reduced = statistics.mean(found["all_reduce", LARGE, SCALED_RATE])
    return [
        bar(
            f"digits, batch {LARGE}, rate scaled linearly: accuracy of {strategy} less that of all_reduce",
            value=statistics.mean(found[strategy, LARGE, SCALED_RATE]) - reduced,
            limit=0.0,
            at_least=True,
        )
        for strategy in ("sma", "pair")
    ]


def rows_of(found: Mapping[tuple[str, int, float], Sequence[float]]) -> list[dict[str, Any]]:
    """As a table."""
    return [
        {
            "strategy": strategy,
            "batch": batch,
            "rate": rate,
            "mean accuracy": round(statistics.mean(values), 4),
            "accuracies": " ".join(f"{value:.3f}" for value in values),
        }
        for (strategy, batch, rate), values in found.items()
    ]


def main() -> None:
    """All rows."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=None, help="runs of each row, 5 unless --quick")
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of)
        return
    found = accuracies(options.seeds or (1 if options.quick else 5))
    finish("sync_accuracy", rows=rows_of(found), bars=bars_of(found))


if __name__ == "__main__":
    main()
