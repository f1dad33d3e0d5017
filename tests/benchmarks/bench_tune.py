"""An ASHA sweep of 24 trials on 8 slots: elastic trials against plain Ray Tune, and against ResourceChangingScheduler.

All three train the same 24 configurations of a small network on scikit-learn's digits (global batch 64, so that the
number of workers changes no result) under the same `ASHAScheduler`, eight at a time. Plain Ray Tune has one slot per
trial, its best choice: nothing is lost to synchronisation, and slots idle only where fewer trials than slots are left.
`ResourceChangingScheduler` deals them out evenly and restarts trials from their last checkpoint to do so. Bars: 1.5 x
and 1.3 x faster, under 5 % of the slots idle, a stopped trial's slots back at work within 1 s.

What a slot computes is a stand-in: a step is a real forward, backward, all-reduce and update of a tiny network, and
`time.sleep` of 12 ms for each sample of the local batch, as if the slot held an accelerator; slots are Ray's logical
CPUs. Two cores cannot speed real computation up eightfold. With ``--sample-ms 6`` trials are half as long, and starting
some twenty processes on few cores weighs twice as much. `ResourceChangingScheduler` is given a perfect speed-up for
nothing: one process sleeps 1/n of the time on n slots.

ASHA decides by who reports first, so that the epochs trained differ a little between sides: both the wall time and the
wall time per trained epoch are compared, the bar is on the latter. A slot is at work from one step's end to the
next within an epoch and its evaluation; idle is measured from the first step of the sweep to its last, and from the
call of `fit` as well.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import bar, finish, ratio, side_parser
from work_log import HeldSlots, WorkLog, back_at_work, idle_share, read_work

from tests.local_cluster import LocalCluster, clean_up

SLOTS = 8
TRIALS = 24
BATCH = 64
TRAINING = 1024
MOST_EPOCHS = 27
SIDES = ("elastic-ray", "Ray Tune", "ResourceChangingScheduler")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a sweep cost one of the systems."""

    system: str
    wall_s: float
    epochs: int
    accuracy: float
    idle: float
    idle_from_call: float
    held: float
    back_s: float | None
    back_most_s: float | None

    def row(self) -> dict[str, Any]:
        """A line of the printed table."""
        return {
            "system": self.system,
            "wall [s]": self.wall_s,
            "epochs": self.epochs,
            "wall per epoch [s]": self.wall_s / self.epochs,
            "best accuracy": self.accuracy,
            "idle": self.idle,
            "idle from the call": self.idle_from_call,
            "slots held": self.held,
            "back at work, median [s]": self.back_s,
            "most [s]": self.back_most_s,
        }


# -- the trials ----------------------------------------------------------------------------------------------


def configurations(trials: int) -> list[dict[str, Any]]:
    """The same for all sides, in a random order that is fixed."""
    import random

    dice = random.Random(4)
    return [{"lr": 10 ** dice.uniform(-3.5, -0.3), "hidden": dice.choice([16, 32, 64])} for _ in range(trials)]


def parts(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, training data and held-out data."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.tensor(config["images"]) / 16.0, torch.tensor(config["labels"]).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, config["hidden"]), torch.nn.ReLU(), torch.nn.Linear(config["hidden"], 10)
    )
    training = torch.utils.data.TensorDataset(images[order[:TRAINING]], labels[order[:TRAINING]])
    return model, training, (images[order[TRAINING:]], labels[order[TRAINING:]])


def accuracy_of(model: Any, held_out: tuple[Any, Any]) -> float:
    import torch

    with torch.no_grad():
        return float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())


def elastic_loop(config: dict[str, Any]) -> None:
    """Our side."""
    import torch

    import elastic_ray as er

    config = {**config, **config["which"]}
    model, training, held_out = parts(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(training, batch_size=BATCH)
    log = WorkLog(config["log"], f"trial{config['index']}")
    for epoch in er.remaining_epochs_until(MOST_EPOCHS):
        for step, (x, y) in enumerate(loader):
            if step == 0:
                log.start()
            optimizer.zero_grad()
            time.sleep(len(x) * config["sample_s"])
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            log.worked()
        accuracy = accuracy_of(model, held_out)
        log.worked()
        er.report({"accuracy": accuracy, "epoch": epoch})


def plain_loop(config: dict[str, Any]) -> None:
    """The same loop as a function trainable on a fixed number of slots, or, with ``changing``, on those that it has."""
    import torch
    from ray import tune

    model, training, held_out = parts(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    first = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    slots = int(tune.get_context().get_trial_resources().required_resources["CPU"]) if config["changing"] else 1
    loader = torch.utils.data.DataLoader(training, batch_size=BATCH, shuffle=True)
    log = WorkLog(config["log"], f"trial{config['index']}")
    for epoch in range(first, MOST_EPOCHS):
        for step, (x, y) in enumerate(loader):
            if step == 0:
                log.start()
            optimizer.zero_grad()
            time.sleep(len(x) * config["sample_s"] / slots)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            log.worked(slots)
        metrics = {"accuracy": accuracy_of(model, held_out), "epoch": epoch}
        log.worked(slots)
        if not config["changing"]:
            tune.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(folder) / "state.pt")
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


# -- the sides -----------------------------------------------------------------------------------------------


def elastic_trainable(constants: dict[str, Any]) -> Any:
    """One worker to all slots for each trial."""
    import ray.train

    import tuning

    return tuning.elastic(
        elastic_loop,
        train_loop_config=constants,
        scaling_config=ray.train.ScalingConfig(num_workers=(1, SLOTS), resources_per_worker={"CPU": 1}),
        elastic_config=_patient(),
        sweep="bench",
    )


def _patient() -> Any:
    """Tens of processes start on two cores: some wait for their turn longer than the usual 2 s."""
    import elastic_ray

    return elastic_ray.ElasticConfig(warm_workers_per_node=0, heartbeat_timeout_s=10.0)


def plain_trainable(constants: dict[str, Any]) -> Any:
    """A slot for each trial."""
    from ray import tune

    def plain(config: dict[str, Any]) -> None:
        plain_loop({**constants, **config["which"]})

    return tune.with_resources(plain, {"CPU": 1})


def run(system: str, trials: int, concurrent: int, sample_s: float) -> Outcome:
    """One sweep on a cluster of its own."""
    local = LocalCluster(num_cpus=SLOTS, _system_config=None)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            return _sweep(system, Path(folder), trials, concurrent, sample_s)
    finally:
        local.shutdown()


def _sweep(system: str, folder: Path, trials: int, concurrent: int, sample_s: float) -> Outcome:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, ResourceChangingScheduler
    from ray.tune.schedulers.resource_changing_scheduler import DistributeResources
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    changing = system == "ResourceChangingScheduler"
    constants = {
        "images": images.astype("float32"),
        "labels": labels.astype("uint8"),
        "log": str(folder),
        "changing": changing,
        "sample_s": sample_s,
    }
    scheduler: Any = ASHAScheduler(max_t=MOST_EPOCHS, grace_period=1, reduction_factor=3)
    if changing:
        scheduler = ResourceChangingScheduler(scheduler, DistributeResources())
    elastic = system == "elastic-ray"
    stops = _Stops()
    space = [{"index": i, **each} for i, each in enumerate(configurations(trials))]
    holder = HeldSlots(SLOTS)
    tuner = tune.Tuner(
        elastic_trainable(constants) if elastic else plain_trainable(constants),
        param_space={"which": tune.grid_search(space)},
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            scheduler=scheduler,
            max_concurrent_trials=concurrent if elastic else SLOTS,
            reuse_actors=not changing,
        ),
        run_config=tune.RunConfig(storage_path=str(folder / "results"), verbose=0, callbacks=[stops.callback()]),
    )
    begin_s = time.time()
    grid = tuner.fit()
    wall_s = time.time() - begin_s
    if grid.errors:
        raise RuntimeError(f"{system}: {grid.errors[0]}")
    work = read_work(folder)
    back = [each for at_s, trial in stops.seen if (each := back_at_work(work, at_s, trial)) is not None]
    print(f"  {system}: {wall_s:.1f} s, {len(back)} stops", flush=True)
    return Outcome(
        system=system,
        wall_s=wall_s,
        epochs=sum(int(result.metrics["training_iteration"]) for result in grid),  # type: ignore[attr-defined]
        accuracy=max(float(result.metrics_dataframe["accuracy"].max()) for result in grid),  # type: ignore[attr-defined]
        idle=idle_share(work, SLOTS, min(w.begin_s for w in work), max(w.end_s for w in work)),
        idle_from_call=idle_share(work, SLOTS, begin_s, begin_s + wall_s),
        held=holder.stop(),
        back_s=statistics.median(back) if back else None,
        back_most_s=max(back, default=None),
    )


class _Stops:
    """When trials were stopped before their end [s since the epoch]."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str]] = []

    def callback(self) -> Any:
        """For ``RunConfig``."""
        from ray import tune

        seen = self.seen

        class Watch(tune.Callback):
            def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
                if trial.last_result["training_iteration"] < MOST_EPOCHS:
                    seen.append((time.time(), f"trial{trial.config['which']['index']}"))

        return Watch()


def main() -> None:
    """The three sides in turn, each on a cluster of its own."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--only", choices=SIDES, default=None)
    parser.add_argument("--concurrent", type=int, default=SLOTS, help="trials at a time of the elastic side")
    parser.add_argument("--sample-ms", type=float, default=12.0, help="stand-in for the computation of a sample [ms]")
    options = parser.parse_args()
    trials, sample_s = 6 if options.quick else TRIALS, options.sample_ms / 1000
    epoch_s = TRAINING * sample_s
    print(
        f"stand-in for computation: {options.sample_ms:g} ms of sleep per sample; an epoch: {epoch_s:.1f} s on a slot"
    )
    outcomes: list[Outcome] = []
    failed = True
    try:
        for system in SIDES:
            if options.only in (None, system):
                print(f"{system}", flush=True)
                outcomes.append(run(system, trials, options.concurrent, sample_s))
        failed = False
    finally:
        clean_up(failed=failed)
    finish("tune", rows=[outcome.row() for outcome in outcomes], bars=bars(outcomes))


def bars(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What must be reached."""
    by = {outcome.system: outcome for outcome in outcomes}
    per_epoch = {system: by[system].wall_s / by[system].epochs if system in by else None for system in SIDES}
    ours = by.get("elastic-ray")
    return [
        *(
            bar(f"wall time per trained epoch, times shorter than {other}", value=value, limit=limit, at_least=True)
            for other, limit in zip(SIDES[1:], (1.5, 1.3), strict=True)
            for value in [ratio(per_epoch[other], per_epoch["elastic-ray"])]
        ),
        bar("part of the slots idle, tail included", value=ours and ours.idle, limit=0.05, at_least=False),
        bar("a stopped trial's slots back at work, median [s]", value=ours and ours.back_s, limit=1.0, at_least=False),
    ]


if __name__ == "__main__":
    main()
