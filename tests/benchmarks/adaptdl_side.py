"""One run of ``bench_adaptive_value.py``'s tasks under AdaptDL 0.2.11, on the same cost curve's clock.

AdaptDL needs torch 2.6 or older and numpy below 2, so it runs in an environment of its own, that
``bench_adaptive_value.py --adaptdl ITS_PYTHON`` names::

    pip install "torch==2.6.0" "numpy<2" adaptdl==0.2.11 requests "setuptools<80" scikit-learn

It looks at its batch between two epochs, and at its step times every 30 s. A step at the small batch takes 0.3 s of the
clock here, for else most runs would end before its first look; an epoch of the character GPT is cut to 100 steps of the
small batch for the same reason.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import bench_adaptive_value as bench

UNIT_S = 0.3
EPOCH_STEPS = 100


def run(name: str, q: float, seed: int) -> bench.Run:
    """Train as ``bench_adaptive_value.run`` does with a batch that adapts."""
    import adaptdl.torch as adl
    import adaptdl.torch._metrics as metrics
    import adaptdl.torch.parallel as parallel
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task, clock = bench.TASKS[name], _Clock()
    metrics.time = parallel.time = clock
    small, rate = task.batches[0], task.rates[0]
    model, optimizer, data, loss_of, score = bench._prepared(name, rate, "cpu")
    if len(data) > 10 * EPOCH_STEPS * small:
        parts = torch.utils.data.random_split(
            data, [EPOCH_STEPS * small] * (len(data) // (EPOCH_STEPS * small)) + [len(data) % (EPOCH_STEPS * small)]
        )
    else:
        parts = [data]
    adl.init_process_group("gloo")
    wrapped = adl.AdaptiveDataParallel(model, optimizer)
    whole = _Parts(parts)
    loader = adl.AdaptiveDataLoader(whole, batch_size=small, shuffle=True, drop_last=True)
    # With one replica and no accumulation it never leaves the initial batch.
    loader.autoscale_batch_size(32 * small, local_bsz_bounds=(1, 32 * small), gradient_accumulation=True)
    steps, samples, scores, batches = 0, 0, [], [small]
    begin_s = clock.now_s
    for epoch in adl.remaining_epochs_until(100_000):
        whole.turn(epoch)
        for rows in loader:
            optimizer.zero_grad()
            loss_of(wrapped, rows).backward()
            count = len(rows[0])
            clock.now_s += UNIT_S * (1.0 + (q - 1.0) * (count / small - 1.0) / 15.0)
            last = loader._elastic.is_optim_step()
            optimizer.step()
            samples += count
            if not last:
                continue
            steps += 1
            if loader.current_batch_size != batches[-1]:
                batches.append(loader.current_batch_size)
            if steps % 5:
                continue
            scores.append(score(model))
            spent = (clock.now_s - begin_s) / UNIT_S
            reached = scores[-1] <= task.goal if task.falls else scores[-1] >= task.goal
            if reached or spent > task.budget:
                return bench.Run(
                    task=name,
                    q=q,
                    batch=0,
                    rate=rate,
                    seed=seed,
                    time=spent if reached else None,
                    steps=steps,
                    samples=samples,
                    end=scores[-1],
                    best=min(scores) if task.falls else max(scores),
                    batches=tuple(batches),
                )
    raise AssertionError("the budget ends before the epochs")


class _Clock(bench.CostClock):
    """AdaptDL asks for the time of day."""

    def time(self) -> float:
        """Seconds of the cost curve."""
        return self.now_s


class _Parts:
    """A dataset whose epochs are parts of another one, in turns."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts, self._now = parts, parts[0]

    def turn(self, epoch: int) -> None:
        """Have the epoch's part."""
        self._now = self._parts[epoch % max(len(self._parts) - 1, 1)]  # the last one is shorter

    def __len__(self) -> int:
        return len(self._now)

    def __getitem__(self, index: int) -> Any:
        return self._now[index]


if __name__ == "__main__":
    import logging

    import numpy as np

    np.Inf, np.int = np.inf, int  # type: ignore[attr-defined]  # noqa: NPY001, NPY201  an older numpy has them
    logging.disable(logging.WARNING)
    print(json.dumps(dataclasses.asdict(run(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))))
