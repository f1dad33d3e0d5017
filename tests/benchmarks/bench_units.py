"""Pause when a unit of two tensor-parallel workers joins, against a plain worker with as many bytes a rank.

Bar: at most 1.5 x. The jobs run one after the other on one machine, a join and a leave in turns; medians are compared.
Each worker has 50 MB of parameters and as much momentum. The unit's job sends both positions' state at once, to twice
as many processes as a worker's join; where cores are few, two workers that join two are what has the same load.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, bar, finish, median, ratio, wait_until

FEATURES, HIDDEN, BATCH = 1024, 6144, 8
LIMIT_S = 60.0


def train_loop(config: dict[str, Any]) -> None:
    """A loop over a model of two layers, which a unit has in parts."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = HIDDEN * config["unit"]
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, FEATURES))
    if config["unit"] > 1:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, er.unit_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=False)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.randn(4096, FEATURES)), batch_size=BATCH)
    for _ in er.remaining_epochs_until(1_000_000):
        for (x,) in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(x), x).backward()
            optimizer.step()


def joins(folder: Path, unit: int, first: int, count: int) -> list[dict[str, float]]:
    """Pauses of changes from ``first`` units to twice as many, each with its parts [s]."""
    import ray.train

    import elastic_ray as er

    folder.mkdir()
    handle = er.ElasticTrainer(
        train_loop,
        train_loop_config={"unit": unit},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(first * unit, 2 * first * unit), resources_per_worker={"CPU": 1}
        ),
        run_config=ray.train.RunConfig(name=folder.name, storage_path=str(folder)),
        scheduling_config=er.SchedulingConfig(unit=unit),
    ).submit()
    try:
        for workers in [first, *[2 * first, first] * count]:
            handle.resize(workers)
            if not wait_until(lambda workers=workers: handle.status().workers == workers, LIMIT_S):
                break
            time.sleep(1.0)  # some steps in each group
        grown = [event for event in handle.events() if (event.from_workers, event.to_workers) == (first, 2 * first)]
        parts = ("vote_s", "group_s", "state_s")
        return [
            {"pause": event.pause_s, **{each: float(event.detail.get(each, 0.0)) for each in parts}} for event in grown
        ]
    finally:
        handle.stop()
        handle.result(timeout=LIMIT_S)


def main() -> None:
    """Both jobs in turns."""
    import ray

    options = arguments(__doc__ or "")
    ray.init(num_cpus=4, log_to_driver=False)
    rows = []
    found: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, unit, first in (("one worker", 1, 1), ("two workers", 1, 2), ("a unit of two", 2, 1)):
            pauses = joins(Path(folder) / name.replace(" ", "-"), unit, first, options.repeats)
            found[name] = median(each["pause"] for each in pauses)
            named = {f"{part} [s]": median(each[part] for each in pauses) for part in pauses[0]} if pauses else {}
            rows.append({"joining": name, "changes": len(pauses), **named})
    unit_s = found["a unit of two"]
    bars = [
        bar(f"pause of a unit's join / of {name}", value=ratio(unit_s, found[name]), limit=1.5, at_least=False)
        for name in ("one worker", "two workers")
    ]
    finish("units", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
