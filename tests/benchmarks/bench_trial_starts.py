"""From `tuner.fit()` to the first training step of each of eight trials, on a running cluster of eight slots.

Both sides train the same small net, a worker a trial, all eight at once, until each has made its first step; plain Ray
Tune's trial is a function in one process. Bars, for two cores: the first trial's first step within 15 s, the eighth's
within 25 s.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import StepLog, bar, finish, median, side_parser, wait_until

from tests.local_cluster import LocalCluster, clean_up

TRIALS, MOST_EPOCHS, TIMEOUT_S = 8, 10_000, 180.0
SIDES = ("Ray Tune", "elastic-ray")


def parts() -> tuple[Any, Any, Any]:
    """Model, optimizer and data."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    data = torch.utils.data.TensorDataset(torch.randn(320, 64), torch.randint(10, (320,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), data


def train(config: dict[str, Any], model: Any, optimizer: Any, loader: Any) -> None:
    """Train one epoch, and log its first step."""
    import torch

    log = StepLog(Path(config["folder"]) / f"trial-{config['trial']}")
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not log.path.exists():
            log.append(world=1, step=1)
        time.sleep(0.05)  # the accelerator's part of a step


def is_over(config: dict[str, Any]) -> bool:
    """True once every trial has made a step."""
    return (Path(config["folder"]) / "over").exists()


def elastic_loop(config: dict[str, Any]) -> None:
    """Our side."""
    import elastic_ray as er

    model, optimizer, data = parts()
    parallel = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=32)
    for epoch in er.remaining_epochs_until(MOST_EPOCHS):
        train(config, parallel, optimizer, loader)
        er.report({"epoch": epoch})
        if is_over(config):
            return


def plain_loop(config: dict[str, Any]) -> None:
    """The same as a function trainable."""
    import torch
    from ray import tune

    model, optimizer, data = parts()
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    for epoch in range(MOST_EPOCHS):
        train(config, model, optimizer, loader)
        tune.report({"epoch": epoch})
        if is_over(config):
            return


def run(system: str) -> list[float]:
    """Seconds until the first step of each trial, ascending; on a cluster of its own, which is there before."""
    import ray.train
    from ray import tune

    import tuning

    scaling = ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1})
    trainable = (
        tuning.elastic(elastic_loop, scaling_config=scaling, sweep="starts")
        if system == "elastic-ray"
        else tune.with_resources(plain_loop, {"CPU": 1})
    )
    local = LocalCluster(num_cpus=TRIALS, _system_config=None)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            logs = [StepLog(Path(folder) / f"trial-{trial}") for trial in range(TRIALS)]

            def end() -> None:
                wait_until(lambda: all(log.path.exists() for log in logs), TIMEOUT_S)
                (Path(folder) / "over").touch()

            threading.Thread(target=end, daemon=True).start()
            tuner = tune.Tuner(
                trainable,
                param_space={"trial": tune.grid_search(list(range(TRIALS))), "folder": folder},
                tune_config=tune.TuneConfig(metric="epoch", mode="max", max_concurrent_trials=TRIALS),
                run_config=tune.RunConfig(storage_path=f"{folder}/results", verbose=0),
            )
            begin_s = time.time()
            grid = tuner.fit()
            if grid.errors:
                raise RuntimeError(f"{system}: {grid.errors[0]}")
            found = sorted(log.read()[0].time_s - begin_s for log in logs if log.path.exists())
    finally:
        local.shutdown()
    print(f"  {system}: " + ", ".join(f"{each:.1f}" for each in found), flush=True)
    return found


def main() -> None:
    """Both sides in turns; medians are compared."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each side")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {system: [] for system in SIDES}
    failed = True
    try:
        for _ in range(1 if options.quick else options.repeats):
            for system in SIDES:
                found[system].append(run(system))
        failed = False
    finally:
        clean_up(failed=failed)
    middle = {
        system: [median(each[place] for each in runs if len(each) == TRIALS) for place in (0, -1)]
        for system, runs in found.items()
    }
    rows = [{"system": name, "first trial [s]": a, "eighth [s]": b} for name, (a, b) in middle.items()]
    first_s, eighth_s = middle["elastic-ray"]
    bars = [
        bar("first trial's first step [s]", value=first_s, limit=15, at_least=False),
        bar("eighth trial's first step [s]", value=eighth_s, limit=25, at_least=False),
    ]
    finish("trial_starts", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
