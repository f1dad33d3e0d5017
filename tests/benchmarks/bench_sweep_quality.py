"""Time and slot-hours until a sweep has found a configuration of quality Q, batch adaptive, on digits and on text.

Three systems run the same random configurations (one draw per seed) under `ASHAScheduler` on eight slots until one of
them reaches the accuracy Q on held-out data: plain Ray Tune with a slot for each trial, `ResourceChangingScheduler`,
and elastic trials whose batch size and learning rate adapt. The others keep the batch that the user wrote. Bars: at
most 1/1.5 of plain Tune's time and 1/1.3 of `ResourceChangingScheduler`'s, with no more slot-hours than plain Tune, in
the median over seeds.

The models and the data are real: scikit-learn's digits, and the next character of the texts of Python's own manual.
What a slot computes is a stand-in, as in ``bench_tune.py``: `time.sleep` for each step, with a part that does not
depend on the local batch. That part is what makes small batches slow on accelerators; its share is that of `cifar10` in
Pollux's published profiles of a Quadro RTX (41 ms for 32 samples, 90 ms for 257: as much as 163 samples).
`ResourceChangingScheduler` is given a perfect split for nothing: one process sleeps as if n slots had a share each.
Slot-hours are those that are reserved, working or not. A trial of ours starts three processes, where the others start
one; on few cores that is a large part of a sweep of a minute. ``--longer 4`` makes all steps four times as long.
"""

from __future__ import annotations

import dataclasses
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import bar, finish, ratio, side_parser
from work_log import HeldSlots

from tests.local_cluster import LocalCluster, clean_up

SLOTS, BATCH, LARGEST, MOST_EPOCHS = 8, 32, 256, 27
FIXED_IN_SAMPLES = 163
CONTEXT = 8
SIDES = ("elastic-ray", "Ray Tune", "ResourceChangingScheduler")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learnt.

    Attributes:
        quality: accuracy to reach [0 to 1]; about a third of the configurations do.
        rates: the decimal logarithms of the smallest and the largest learning rate.
        training: samples of an epoch.
        sample_s: what a sample of the local batch takes [s].
    """

    quality: float
    rates: tuple[float, float]
    training: int
    sample_s: float


TASKS = {
    "digits": Task(quality=0.96, rates=(-3.5, -0.3), training=1024, sample_s=0.001),
    "text": Task(quality=0.36, rates=(-4.5, -1.0), training=5120, sample_s=0.0003),
}


# -- the trials --------------------------------------------------------------------------------------------------------


def data_of(name: str) -> tuple[Any, Any]:
    """Inputs and labels, training samples first."""
    import torch

    dice = torch.Generator().manual_seed(0)
    if name == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(images), generator=dice)
        return torch.tensor(images, dtype=torch.float32)[order] / 16.0, torch.tensor(labels)[order]
    from pydoc_data import topics

    text = " ".join(topics.topics[key] for key in sorted(topics.topics)).lower()
    text = re.sub(r" +", " ", re.sub(r"[^a-z .]+", " ", text))
    letters = {letter: index for index, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([letters[letter] for letter in text])
    places = torch.randperm(len(codes) - CONTEXT - 1, generator=dice)[:6144]
    return torch.stack([codes[place : place + CONTEXT] for place in places]), codes[places + CONTEXT]


def model_of(name: str, hidden: int) -> Any:
    """A small network."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "digits":
        return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    letters = nn.Sequential(nn.Embedding(28, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, hidden))
    return nn.Sequential(letters, nn.ReLU(), nn.Linear(hidden, 28))


def parts(config: dict[str, Any]) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """Model, optimizer, training data and held-out data."""
    import torch

    torch.set_num_threads(1)
    inputs, labels = torch.as_tensor(config["inputs"]), torch.as_tensor(config["labels"])
    training = TASKS[config["task"]].training
    model = model_of(config["task"], config["hidden"])
    optimizer: torch.optim.Optimizer
    if config["task"] == "digits":
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    data = torch.utils.data.TensorDataset(inputs[:training], labels[:training])
    return model, optimizer, data, (inputs[training:], labels[training:])


def accuracy_of(model: Any, held_out: tuple[Any, Any]) -> float:
    """On held-out data [0 to 1]."""
    import torch

    with torch.no_grad():
        return float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())


def elastic_loop(config: dict[str, Any]) -> None:
    """Our side."""
    import torch

    import elastic_ray as er

    config = {**config, **config["which"]}
    model, optimizer, training, held_out = parts(config)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(training, batch_size=BATCH, shuffle=True)
    loader.autoscale_batch_size(LARGEST, local_bsz_bounds=(8, LARGEST))
    for epoch in er.remaining_epochs_until(MOST_EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep((FIXED_IN_SAMPLES + len(x)) * config["sample_s"])
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        er.report({"accuracy": accuracy_of(model, held_out), "epoch": epoch})


def plain_loop(config: dict[str, Any]) -> None:
    """The same as a function trainable on a slot, or, with ``changing``, on those that it has."""
    import torch
    from ray import tune

    model, optimizer, training, held_out = parts(config)
    first = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    slots = int(tune.get_context().get_trial_resources().required_resources["CPU"]) if config["changing"] else 1
    loader = torch.utils.data.DataLoader(training, batch_size=BATCH, shuffle=True)
    for epoch in range(first, MOST_EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep((FIXED_IN_SAMPLES + len(x) / slots) * config["sample_s"])
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        metrics = {"accuracy": accuracy_of(model, held_out), "epoch": epoch}
        if not config["changing"]:
            tune.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(folder) / "state.pt")
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


# -- the sides ---------------------------------------------------------------------------------------------------------


def elastic_trainable(constants: dict[str, Any]) -> Any:
    """One worker to all slots for each trial."""
    import ray.train

    import elastic_ray
    import tuning

    return tuning.elastic(
        elastic_loop,
        train_loop_config=constants,
        scaling_config=ray.train.ScalingConfig(num_workers=(1, SLOTS), resources_per_worker={"CPU": 1}),
        elastic_config=elastic_ray.ElasticConfig(warm_workers_per_node=0, heartbeat_timeout_s=10.0),
        sweep="quality",
    )


def plain_trainable(constants: dict[str, Any]) -> Any:
    """A slot for each trial."""
    from ray import tune

    def plain(config: dict[str, Any]) -> None:
        plain_loop({**constants, **config["which"]})

    return tune.with_resources(plain, {"CPU": 1})


def goal(quality: float) -> Any:
    """Ends the sweep with the first report of such an accuracy; ``reached_s`` is when that was [s since the epoch].

    ``best`` is the best accuracy so far.
    """
    from ray import tune

    class Goal(tune.Stopper):
        reached_s: float | None = None
        best = 0.0

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            self.best = max(self.best, result.get("accuracy", 0.0))
            if self.reached_s is None and self.best >= quality:
                self.reached_s = time.time()
            return self.reached_s is not None

        def stop_all(self) -> bool:
            return self.reached_s is not None

    return Goal()


def configurations(task: Task, trials: int, seed: int) -> list[dict[str, Any]]:
    """The same for all sides."""
    dice = random.Random(seed)
    drawn = [{"lr": 10 ** dice.uniform(*task.rates), "hidden": dice.choice([32, 64, 128])} for _ in range(trials)]
    return [{"index": index, **each} for index, each in enumerate(drawn)]


def run(system: str, name: str, trials: int, seed: int, longer: float = 1.0) -> dict[str, Any]:
    """One sweep on a cluster of its own; the times are None where the quality was not reached."""
    local = LocalCluster(num_cpus=SLOTS, _system_config=None)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            row = _sweep(system, name, Path(folder), trials, seed, longer)
    finally:
        local.shutdown()
    print(f"  {row}", flush=True)
    return row


def _sweep(system: str, name: str, folder: Path, trials: int, seed: int, longer: float) -> dict[str, Any]:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, ResourceChangingScheduler
    from ray.tune.schedulers.resource_changing_scheduler import DistributeResources

    task, changing, elastic = TASKS[name], system == "ResourceChangingScheduler", system == "elastic-ray"
    inputs, labels = data_of(name)
    constants = {
        "task": name,
        "inputs": inputs.numpy(),
        "labels": labels.numpy(),
        "changing": changing,
        "sample_s": task.sample_s * longer,
    }
    scheduler: Any = ASHAScheduler(max_t=MOST_EPOCHS, grace_period=1, reduction_factor=3)
    if changing:
        scheduler = ResourceChangingScheduler(scheduler, DistributeResources())
    stopper, held = goal(task.quality), HeldSlots(SLOTS)
    tuner = tune.Tuner(
        elastic_trainable(constants) if elastic else plain_trainable(constants),
        param_space={"which": tune.grid_search(configurations(task, trials, seed))},
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            scheduler=scheduler,
            max_concurrent_trials=SLOTS,
            reuse_actors=not changing,
        ),
        run_config=tune.RunConfig(storage_path=str(folder / "results"), verbose=0, stop=stopper),
    )
    begin_s = time.time()
    grid = tuner.fit()
    held.stop()
    if grid.errors:
        raise RuntimeError(f"{system}: {grid.errors[0]}")
    reached_s = stopper.reached_s
    return {
        "task": name,
        "seed": seed,
        "system": system,
        "until Q [s]": reached_s and reached_s - begin_s,
        "slot-hours": reached_s and held.slot_seconds(reached_s) / 3600,
        "best accuracy": stopper.best,
    }


def main() -> None:
    """The three sides in turn for each seed and task, each on a cluster of its own."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--only", choices=SIDES, default=None)
    parser.add_argument("--task", choices=tuple(TASKS), default=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--longer", type=float, default=1.0, help="times that steps last longer")
    options = parser.parse_args()
    seeds, trials = (1, 8) if options.quick else (options.seeds, options.trials)
    rows: list[dict[str, Any]] = []
    failed = True
    try:
        for seed in range(seeds):
            for name in TASKS if options.task is None else (options.task,):
                sides = [side for side in SIDES if options.only in (None, side)]
                rows += [run(side, name, trials, seed, options.longer) for side in sides]
        failed = False
    finally:
        clean_up(failed=failed)
    finish("sweep_quality", rows=rows, bars=[each for name in TASKS for each in bars(name, rows)])


def bars(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be reached on a task, of medians over the seeds in which every side has found a configuration."""
    mine = [row for row in rows if row["task"] == name]
    found = {seed for seed in {row["seed"] for row in mine} if all(r["until Q [s]"] for r in mine if r["seed"] == seed)}

    def middle(system: str, what: str) -> float | None:
        values = [row[what] for row in mine if row["system"] == system and row["seed"] in found]
        return statistics.median(values) if values else None

    ours = middle("elastic-ray", "until Q [s]")
    return [
        *(
            bar(f"{name}: time until Q, times shorter than {other}", value=value, limit=limit, at_least=True)
            for other, limit in zip(SIDES[1:], (1.5, 1.3), strict=True)
            for value in [ratio(middle(other, "until Q [s]"), ours)]
        ),
        bar(
            f"{name}: slot-hours until Q, as a multiple of Ray Tune's",
            value=ratio(middle("elastic-ray", "slot-hours"), middle("Ray Tune", "slot-hours")),
            limit=1.0,
            at_least=False,
        ),
    ]


if __name__ == "__main__":
    main()
