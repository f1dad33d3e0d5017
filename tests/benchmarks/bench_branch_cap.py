"""A cap of the batch that is ten times too high, under Seesaw: what branches hold of it.

The character GPT of ``bench_adaptive_value.py`` (critical batch about 50 sequences) with AdamW at the rate that was
tuned for its batch of 8, and a cosine over a fixed number of sequences. Three ways to train on the same ones: the fixed
batch; ``schedule="seesaw"`` with a cap of 512; and the same, where branches at the present, twice and four times the
batch are compared at a quarter, at half and at 70 % of the training, with the rates of Seesaw, and bound the batch as
in a job (in one process here: ``tests/job/test_branches.py`` has jobs). The noise scale bounds the batch in both.

Bar: held-out loss with branches at most 1 % above that of the fixed batch with the same seed, median of the seeds.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

from bench_adaptive_value import _prepared
from common import bar, finish, side_parser

BATCH, CAP, RATE = 8, 512, 6e-3
SEQUENCES = 9600
AT = (0.25, 0.5, 0.7)
WAYS = ("fixed", "cap 10 x too high", "the same with branches")


def main() -> None:
    """Each way with each seed."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    seeds, sequences = (1, SEQUENCES // 8) if options.quick else (options.seeds, SEQUENCES)
    rows = [{"way": way, "seed": seed, **train(way, seed, sequences)} for seed in range(seeds) for way in WAYS]

    def worse(way: str) -> float:
        fixed, these = ([row["loss"] for row in rows if row["way"] == each] for each in (WAYS[0], way))
        return statistics.median(b / a for a, b in zip(fixed, these, strict=True))

    bars = [
        bar(f"loss of {way!r} over that of the fixed batch", value=worse(way), limit=1.01, at_least=False)
        for way in WAYS[1:]
    ]
    finish("a cap that is ten times too high", rows=rows, bars=bars)


def train(way: str, seed: int, sequences: int) -> dict[str, Any]:
    """One run: its loss, its steps, its largest batch, and the critical batches that were measured."""
    import torch

    import elastic_ray as er
    from elastic_ray.run.current import session_of_thread, set_session

    set_session(None)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model, optimizer, data, loss_of, score = _prepared("gpt", RATE, "cpu")
    data = torch.utils.data.TensorDataset(data.tensors[0][:sequences])
    planned = sequences // BATCH
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * min(1.0, step / planned))))
    )
    wrapped = er.AdaptiveDataParallel(
        model, optimizer, cosine, schedule="progress" if way == "fixed" else "seesaw", scaling_rule=None
    )
    loader = er.AdaptiveDataLoader(data, batch_size=BATCH, shuffle=True, seed=seed)
    if way != "fixed":
        loader.autoscale_batch_size(max_batch_size=CAP)
    done = steps = largest = 0
    due = list(AT) if way == WAYS[2] else []
    found: list[int | None] = []
    for _ in er.remaining_epochs_until(1):
        for rows in loader:
            size = len(rows[0])
            optimizer.zero_grad()
            loss_of(wrapped, rows).backward()
            optimizer.step()
            cosine.step()
            done, steps, largest = done + size, steps + 1, max(largest, size)
            if due and done >= due[0] * sequences:
                due.pop(0)
                found.append(measured(model, optimizer, data.tensors[0], loss_of, size, seed + len(due)))
                if found[-1] is not None:
                    session: Any = session_of_thread()
                    session.membership.critical_batch = found[-1]
    return {"loss": score(model), "steps": steps, "largest": largest, "measured": " ".join(map(str, found))}


def measured(model: Any, optimizer: Any, data: Any, loss_of: Any, batch: int, seed: int) -> int | None:
    """Branches from the present state: the critical batch, None where the noise hides it."""
    import torch

    from elastic_ray.batch.branch_losses import BranchPlan, compare

    plan = BranchPlan(steps=max(32, 1600 // batch))
    samples, rate = plan.steps * batch, optimizer.param_groups[0]["lr"] * math.sqrt(batch / BATCH)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:samples]
    curves = {}
    for size in plan.sizes(batch, CAP):
        branch = copy.deepcopy(model)
        own = torch.optim.AdamW(branch.parameters())
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in own.param_groups:
            group["lr"] = rate * math.sqrt(size / batch)
        curve = []
        for at, rows in zip(itertools.count(size, size), _batches(data[order], size), strict=False):
            own.zero_grad()
            loss = loss_of(branch, (rows,))
            loss.backward()
            own.step()
            curve.append((float(at), float(loss.detach())))
        curves[size] = curve
    return compare(plan, 0, samples, curves).critical_batch


def _batches(rows: Any, size: int) -> Iterator[Any]:
    for begin in range(0, len(rows) - size + 1, size):
        yield rows[begin : begin + size]


if __name__ == "__main__":
    main()
