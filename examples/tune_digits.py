"""A sweep of Ray Tune whose trials are elastic jobs, beside an ordinary one, on one Ray cluster of 8 slots.

Optuna proposes learning rate, width and batch size of a small net for scikit-learn's digits, ASHA stops what does not
keep up, and the allocator moves slots between trials and to the other job while they train. Takes two to three
minutes on two cores and needs `pip install -e ".[examples,tune]"`:

    python examples/tune_digits.py
    python examples/tune_digits.py --smoke      two short trials: whether the installation works
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# One thread per worker, for eight of them share two cores; read when torch is imported, here and in workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import digits_loop
import ray
import ray.train
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

import elastic_ray as er
import tuning

SLOTS = 8
SMOKE = "--smoke" in sys.argv[1:]
TRIALS = 2 if SMOKE else int(os.environ.get("TRIALS", "12"))
EPOCHS = 2 if SMOKE else 9
SPACE = {
    "lr": tune.loguniform(1e-3, 1.0),  # at the initial batch size; elastic_ray scales it from there
    "width": tune.choice([16, 64, 128]),
    "batch_size": tune.choice([16, 32, 64]),  # the initial one
}
# The cost of a step is that of a larger net on an accelerator, see digits_loop.stand_in_for_a_larger_net.
COST = {} if SMOKE else {"step_s": 0.02, "sample_s": 0.003}


def train(config: dict[str, Any]) -> None:
    """One trial."""
    torch.manual_seed(0)
    training, held_out = digits_loop.split(config["images"], config["labels"])
    model = torch.nn.Sequential(
        torch.nn.Linear(64, config["width"]), torch.nn.ReLU(), torch.nn.Linear(config["width"], 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(training, batch_size=config["batch_size"])
    loader.autoscale_batch_size(max_batch_size=256, local_bsz_bounds=(4, 128))
    images, labels = held_out[:]
    for epoch in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            digits_loop.stand_in_for_a_larger_net(config, len(y))
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        er.report({"accuracy": accuracy, "epoch": epoch})


def sweep(directory: str, constants: dict[str, Any]) -> tune.ResultGrid:
    """All trials; four at a time, each between one worker and the whole cluster."""
    trainable = tuning.elastic(
        train,
        train_loop_config=constants,
        scaling_config=ray.train.ScalingConfig(num_workers=(1, SLOTS)),
        # Eight workers and their start on two cores: some wait for their turn longer than the usual 2 s.
        elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0, warm_workers_per_node=0),
    )
    tuner = tune.Tuner(
        trainable,
        param_space=SPACE,
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            search_alg=OptunaSearch(seed=0),
            scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=3),
            num_samples=TRIALS,
            max_concurrent_trials=4,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name="sweep", storage_path=directory, verbose=0),
    )
    return tuner.fit()


def neighbour(directory: str, constants: dict[str, Any]) -> er.JobHandle:
    """An ordinary elastic job on the same cluster."""
    trainer = er.ElasticTrainer(
        digits_loop.train,
        train_loop_config={**constants, "net": "mlp", "optimizer": "sgd", "lr": 0.2, "epochs": EPOCHS + 1},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 4)),
        run_config=ray.train.RunConfig(name="neighbour", storage_path=directory),
        elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0),
    )
    return trainer.submit()


def show(grid: tune.ResultGrid, job: er.JobHandle, took_s: float) -> None:
    """Sizes of all trials epoch by epoch, the other job, and the best configuration."""
    print(f"\n{'trial':<6} {'lr':>7} {'width':>6} {'batch':>6} {'accuracy':>9}  workers after each epoch")
    results = [grid[number] for number in range(len(grid))]
    for number, result in enumerate(results):
        config, sizes = result.config, [int(size) for size in result.metrics_dataframe["workers"]]
        print(
            f"{number:<6} {config['lr']:>7.4f} {config['width']:>6} {config['batch_size']:>6} "
            f"{result.metrics['accuracy']:>9.3f}  {' '.join(map(str, sizes))}"
        )
    wanted = (er.events.EventKind.STARTED, er.events.EventKind.RESIZE)
    sizes = [event.to_workers for event in job.events() if event.kind in wanted]
    print(f"neighbour: accuracy {job.result().metrics['accuracy']:.3f}, sizes {' '.join(map(str, sizes))}")
    moved = sum(
        before != after
        for result in results
        for before, after in itertools.pairwise(result.metrics_dataframe["workers"].tolist())
    )
    best = grid.get_best_result()
    chosen = {name: best.config[name] for name in SPACE}
    print(f"\n{len(grid)} trials in {took_s:.0f} s; trials changed size {moved} times between two epochs")
    print(f"best configuration: {chosen}, accuracy {best.metrics['accuracy']:.3f}")


def main() -> int:
    """Run the sweep; 0 when no trial has failed."""
    ray.init(address="local", num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory(prefix="elastic-ray-sweep-") as directory:
        try:
            constants = {**digits_loop.digits(), **COST}
            begin_s = time.monotonic()
            job = neighbour(str(Path(directory) / "jobs"), constants)
            grid = sweep(directory, constants)
            took_s = time.monotonic() - begin_s
            job.wait()
            show(grid, job, took_s)
        finally:
            ray.shutdown()
    for error in grid.errors:
        print(error, file=sys.stderr)
    return 1 if grid.errors else 0


if __name__ == "__main__":
    sys.exit(main())
