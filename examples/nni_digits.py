"""An NNI experiment whose trials are elastic jobs, beside an ordinary one, on one Ray cluster of 8 slots.

NNI's TPE proposes learning rate, width and batch size of a small net for scikit-learn's digits, its Medianstop stops
what is worse than half of the others, and the allocator moves slots between trials and to the other job while they
train. The train function is written for NNI; its web page is at http://127.0.0.1:8080 meanwhile. Takes two to three
minutes on two cores and needs `pip install -e ".[examples,nni]"`:

    python examples/nni_digits.py
    python examples/nni_digits.py --smoke      two short trials: whether the installation works
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
import nni
import ray
import ray.train
import torch

import elastic_ray as er
import tuning
import tuning.nni

SLOTS = 8
SMOKE = "--smoke" in sys.argv[1:]
TRIALS = 2 if SMOKE else int(os.environ.get("TRIALS", "12"))
PORT = int(os.environ.get("PORT", "0" if SMOKE else "8080"))
EPOCHS = 2 if SMOKE else 9
SPACE = {
    "lr": {"_type": "loguniform", "_value": [1e-3, 1.0]},  # at the initial batch size; elastic_ray scales it from there
    "width": {"_type": "choice", "_value": [16, 64, 128]},
    "batch_size": {"_type": "choice", "_value": [16, 32, 64]},  # the initial one
}
# The cost of a step is that of a larger net on an accelerator, see digits_loop.stand_in_for_a_larger_net.
COST = {} if SMOKE else {"step_s": 0.02, "sample_s": 0.003}


def train(config: dict[str, Any]) -> None:
    """One trial, as it is written for NNI; every worker runs it."""
    parameters = nni.get_next_parameter()
    torch.manual_seed(0)
    training, held_out = digits_loop.split(config["images"], config["labels"])
    width = parameters["width"]
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=parameters["lr"], momentum=0.9)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(training, batch_size=parameters["batch_size"])
    loader.autoscale_batch_size(max_batch_size=256, local_bsz_bounds=(4, 128))
    images, labels = held_out[:]
    accuracy = 0.0
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            digits_loop.stand_in_for_a_larger_net(config, len(y))
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        nni.report_intermediate_result(accuracy)
    nni.report_final_result(accuracy)


def sweep(directory: str, constants: dict[str, Any]) -> tuning.nni.Results:
    """All trials; four at a time, each between one worker and the whole cluster."""
    experiment = tuning.nni.Experiment(
        train,
        SPACE,
        tuner={"name": "TPE", "class_args": {"seed": 0}},
        assessor={"name": "Medianstop", "class_args": {"start_step": 3}},
        trial_concurrency=4,
        max_trial_number=TRIALS,
        train_loop_config=constants,
        scaling_config=ray.train.ScalingConfig(num_workers=(1, SLOTS)),
        # Eight workers and their start on two cores: some wait for their turn longer than the usual 2 s.
        elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0, warm_workers_per_node=0),
        promise=tuning.Promise(metric="default", mode="max", max_t=EPOCHS, grace_period=1, reduction_factor=3),
        name="sweep",
        directory=directory,
    )
    return experiment.run(PORT)


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


def show(results: tuning.nni.Results, job: er.JobHandle, took_s: float) -> None:
    """Sizes of all trials epoch by epoch, the other job, and the best configuration."""
    print(f"\n{'trial':<6} {'lr':>7} {'width':>6} {'batch':>6} {'accuracy':>9} {'status':<14} workers after each epoch")
    for trial in results.trials:
        chosen = trial.parameters
        print(
            f"{trial.sequence:<6} {chosen['lr']:>7.4f} {chosen['width']:>6} {chosen['batch_size']:>6} "
            f"{trial.value or 0.0:>9.3f} {trial.status:<14} {' '.join(map(str, trial.workers))}"
        )
    wanted = (er.events.EventKind.STARTED, er.events.EventKind.RESIZE)
    sizes = [event.to_workers for event in job.events() if event.kind in wanted]
    print(f"neighbour: accuracy {job.result().metrics['accuracy']:.3f}, sizes {' '.join(map(str, sizes))}")
    moved = sum(before != after for trial in results.trials for before, after in itertools.pairwise(trial.workers))
    print(f"\n{len(results.trials)} trials in {took_s:.0f} s; trials changed size {moved} times between two epochs")
    print(f"best configuration: {dict(results.best.parameters)}, accuracy {results.best.value:.3f}")


def main() -> int:
    """Run the experiment; 0 when no trial has failed."""
    ray.init(address="local", num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory(prefix="elastic-ray-sweep-") as directory:
        try:
            constants = {**digits_loop.digits(), **COST}
            begin_s = time.monotonic()
            job = neighbour(str(Path(directory) / "jobs"), constants)
            results = sweep(str(Path(directory) / "nni"), constants)
            took_s = time.monotonic() - begin_s
            job.wait()
            show(results, job, took_s)
        finally:
            ray.shutdown()
    failed = [trial for trial in results.trials if trial.status not in ("SUCCEEDED", "EARLY_STOPPED")]
    for trial in failed:
        print(f"trial {trial.sequence}: {trial.status} {trial.error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
