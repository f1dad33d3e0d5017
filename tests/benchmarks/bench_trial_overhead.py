"""What an elastic trial with one worker costs beside the same loop as a plain function of Ray Tune; trials of 60 s.

The same network, data and batches; a step is a real forward, backward and update and `time.sleep` of 50 ms, and the
metric is reported once in three seconds. Trials run one after the other, on a cluster with one slot: the first one
pays the start of a sweep's processes (allocator, controller, worker, each of which imports torch), the others find
them waiting. Measured from the trial's start to its end as Tune's callbacks have it. Bar: the trials after the first
take under 5 % longer than 60 s of plain trial.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from common import bar, finish, side_parser

from tests.local_cluster import LocalCluster, clean_up

STEP_S = 0.05
STEPS_PER_EPOCH = 60
BATCH = 16


def parts(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, optimizer and data."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    rows = STEPS_PER_EPOCH * BATCH
    data = torch.utils.data.TensorDataset(torch.randn(rows, 64), torch.randint(10, (rows,)))
    return model, torch.optim.SGD(model.parameters(), lr=config["lr"]), data


def elastic_loop(config: dict[str, Any]) -> None:
    """Our side."""
    import torch

    import elastic_ray as er

    model, optimizer, data = parts(config)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=BATCH)
    for epoch in er.remaining_epochs_until(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(STEP_S)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        er.report({"loss": loss.item(), "epoch": epoch})


def plain_loop(config: dict[str, Any]) -> None:
    """The same loop as a function trainable."""
    import torch
    from ray import tune

    model, optimizer, data = parts(config)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    for epoch in range(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(STEP_S)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        tune.report({"loss": loss.item(), "epoch": epoch})


def run(system: str, epochs: int, trials: int) -> list[float]:
    """Seconds of each trial, in order."""
    import ray.train
    from ray import tune

    import tuning

    began: dict[str, float] = {}
    took: list[float] = []

    class Clock(tune.Callback):
        def on_trial_start(self, trial: Any, **_: Any) -> None:
            began[trial.trial_id] = time.monotonic()

        def on_trial_complete(self, trial: Any, **_: Any) -> None:
            took.append(time.monotonic() - began[trial.trial_id])
            print(f"  {system}: {took[-1]:.1f} s", flush=True)

    scaling = ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1})
    elastic = system == "elastic-ray"
    trainable = (
        tuning.elastic(elastic_loop, scaling_config=scaling, sweep="bench")
        if elastic
        else tune.with_resources(plain_loop, {"CPU": 1})
    )
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        grid = tune.Tuner(
            trainable,
            param_space={"lr": 0.01, "epochs": epochs},
            tune_config=tune.TuneConfig(
                metric="loss", mode="min", num_samples=trials, max_concurrent_trials=1, reuse_actors=True
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0, callbacks=[Clock()]),
        ).fit()
    if grid.errors:
        raise RuntimeError(f"{system}: {grid.errors[0]}")
    return took


def main() -> None:
    """Both sides in turn, on clusters of their own."""
    options = side_parser(__doc__ or "", sides=False).parse_args()
    epochs, trials = (2, 2) if options.quick else (20, 3)
    times: dict[str, list[float]] = {}
    failed = True
    try:
        for system in ("Ray Tune", "elastic-ray"):
            local = LocalCluster(num_cpus=1, _system_config=None)
            try:
                times[system] = run(system, epochs, trials)
            finally:
                local.shutdown()
        failed = False
    finally:
        clean_up(failed=failed)
    later = {system: statistics.median(each[1:]) for system, each in times.items()}
    rows = [{"system": s, "first trial [s]": each[0], "later [s]": later[s]} for s, each in times.items()]
    value = later["elastic-ray"] / later["Ray Tune"] - 1.0
    first = times["elastic-ray"][0] / times["Ray Tune"][0] - 1.0
    bars = [
        bar("overhead of a trial of 60 s", value=value, limit=0.05, at_least=False),
        bar("the same, a sweep's first trial", value=first, limit=0.05, at_least=False),
    ]
    finish("trial overhead", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
