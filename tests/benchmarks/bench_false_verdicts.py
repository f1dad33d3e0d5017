"""Real loops without a straggler: how often one is reported, in so many minutes of each.

Two ranks over gloo, one thread each, train in one run after the other: an MLP on digits whose batch grows with the
noise scale, and a transformer on sequences of very different lengths, each batch padded to its longest. Bar: no verdict
in 30 minutes, 15 of each loop. What else runs on the machine counts as well: a rank whose core is taken by others is
slow.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from bench_sync import launch
from common import bar, finish, side_parser
from network import Loopback

WORLD, LONGEST, VOCABULARY = 2, 256, 256


def digits() -> tuple[Any, Any, Callable[[Any], Any], tuple[int, int | None]]:
    """Model, dataset, how samples become a batch, the first batch size and the largest one (None: it stays)."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    images, classes = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(classes))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, data, torch.utils.data.default_collate, (32, 512)


def sequences() -> tuple[Any, Any, Callable[[Any], Any], tuple[int, int | None]]:
    """The same; lengths are log-normal, so that few batches have the longest."""
    import torch
    from step_models import Transformer
    from torch import nn

    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(3.5 + 0.8 * torch.randn(2048, generator=generator)).long().clamp(4, LONGEST)
    rows = [torch.randint(VOCABULARY, (int(length),), generator=generator) for length in lengths]
    data = [(row, int(row.sum()) % 10) for row in rows]

    def collate(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
        tokens = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
        return tokens, torch.tensor([label for _, label in samples])

    model = Transformer()
    model.position = nn.Parameter(torch.zeros(1, 128))
    return model, data, collate, (16, None)


LOOPS = {"digits": digits, "sequences": sequences}


def run_rank(name: str, seconds: float) -> None:
    """Train for so long; rank 0 prints what was told, and how many steps there were, as JSON."""
    import torch
    import torch.distributed as dist

    import elastic_ray as er

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("elastic_ray").addHandler(handler)
    model, data, collate, (batch_size, largest) = LOOPS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer, stragglers="tell")
    loader = er.AdaptiveDataLoader(data, batch_size=batch_size, collate_fn=collate)
    if largest is not None:
        loader.autoscale_batch_size(max_batch_size=largest)
    steps, deadline = 0, time.monotonic() + seconds
    over = torch.zeros(1)
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
        over[0] = float(time.monotonic() > deadline)
        dist.all_reduce(over)
        if over:
            break
    if dist.get_rank() == 0:
        verdicts = [text for text in told if "as long as the others" in text]
        print("RESULT " + json.dumps({"steps": steps, "verdicts": verdicts}), flush=True)
    dist.barrier()
    os._exit(0)  # between two epochs: nothing to finish


def main(options: argparse.Namespace) -> None:
    """Both loops."""
    seconds = 60.0 * (0.25 if options.quick else options.minutes)
    rows = []
    for name in LOOPS:
        found = launch(Loopback(), WORLD, [name, str(seconds)], timeout_s=seconds + 300.0, script=__file__)
        rows.append({"loop": name, "minutes": seconds / 60.0, "load": os.getloadavg()[1], **found})
    false = sum(len(row["verdicts"]) for row in rows)
    claim = f"verdicts in {sum(row['minutes'] for row in rows):g} minutes without a straggler"
    finish("false_verdicts", rows=rows, bars=[bar(claim, value=false, limit=0, at_least=False)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        run_rank(sys.argv[2], float(sys.argv[3]))
    else:
        parser = side_parser(__doc__ or "", sides=False)
        parser.add_argument("--minutes", type=float, default=15.0, help="of each loop")
        main(parser.parse_args())
