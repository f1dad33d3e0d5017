"""Optimizer state in tiles against replicated training: 25 M parameters with AdamW, gloo.

Bars: the pause of a join at most 0.9 x (one owner) and 1.0 x (two owners) the replicated one, that of a SIGKILL at most
1.2 x with no committed step lost; a step of four ranks at most 1.15 x, with sliced gradients 1.10 x; moments on each
rank at most 2 / 4 + 5 %. Steps are measured in alternating blocks in the same processes. Pauses are medians over jobs
that follow one another, each of which grows twice: single ones differ by a factor of two on a crowded machine.
"""

from __future__ import annotations

import functools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from common import StepLog, bar, finish, median, side_parser
from elastic_side import ElasticJob

WORLD = 4
_STEPS, _WAIT_S = 8, 150.0
STEPPED = ("all_reduce", "zero1", "zero2")
STRATEGIES = {"replicated": "all_reduce", "one owner": "one", "two owners": "zero1"}


def main() -> None:
    """Steps and memory, then pauses."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--part", choices=("both", "steps", "pauses"), default="both")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    if options.part in ("both", "steps"):
        _steps(rows, bars, blocks=2 if options.quick else 6)
    if options.part in ("both", "pauses"):
        _pauses(rows, bars, repeats=1 if options.quick else 2)
    finish("sharded", rows=rows, bars=bars)


# -- steps and memory ------------------------------------------------------------------------------------------------


def train_blocks(blocks: int) -> dict[str, Any]:
    """On one rank: median step time by strategy, and bytes of moments that this rank holds."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    model = common.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parallel = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy="all_reduce")
    loader = er.AdaptiveDataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH, drop_last=True)
    times: dict[str, list[float]] = {strategy: [] for strategy in STEPPED}
    moments: dict[str, int] = {}
    step, before, per_block = 0, 0.0, 8
    for _ in er.remaining_epochs_until(1):
        for x, y in loader:
            strategy = STEPPED[step // per_block % len(STEPPED)]
            if step % per_block == 0:
                parallel.set_strategy(strategy)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            now = time.perf_counter()
            if step % per_block > 2:  # the first ones divide the state, or gather it
                times[strategy].append(now - before)
            before = now
            step += 1
            if step % per_block == 0:
                moments[strategy] = _moments(optimizer, parallel)
            if step == len(STEPPED) * blocks * per_block:
                break
    return {"step_s": {name: statistics.median(each) for name, each in times.items()}, "moments": moments}


def _moments(optimizer: Any, parallel: Any) -> int:
    """Bytes of memory that hold optimizer state, whatever part of them is in use."""
    import torch

    held = parallel._steps[0].tiles._holder.held
    states = [*optimizer.state.values(), *(held.states.values() if held is not None else ())]
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(storages.values())


def _steps(rows: list[dict[str, Any]], bars: list[dict[str, Any]], *, blocks: int) -> None:
    from tests.loop.ranks import Ranks

    ranks = Ranks()
    found = ranks.run(train_blocks, blocks, world=WORLD, timeout_s=900.0)
    ranks.close()
    slowest = {name: max(each["step_s"][name] for each in found) for name in found[0]["step_s"]}
    most = {name: max(each["moments"][name] for each in found) for name in found[0]["moments"]}
    for name in slowest:
        rows.append({"what": f"step at W={WORLD} [s]", "strategy": name, "value": slowest[name]})
        rows.append({"what": "moments of a rank [MB]", "strategy": name, "value": most[name] / 1e6})
    for name, limit in (("zero1", 1.15), ("zero2", 1.10)):
        times, share = slowest[name] / slowest["all_reduce"], most[name] / most["all_reduce"]
        bars.append(bar(f"step, {name} / replicated", value=times, limit=limit, at_least=False))
        bars.append(bar(f"moments, {name} / replicated", value=share, limit=2 / WORLD + 0.05, at_least=False))


# -- pauses ----------------------------------------------------------------------------------------------------------


def train_loop(config: dict[str, Any]) -> None:
    """The loop of `elastic_side`, with AdamW and a strategy."""
    import torch

    import elastic_ray as er
    from elastic_ray.sync.spec import Owner

    torch.set_num_threads(1)
    model = common.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    strategy = Owner(unit="tile", copies=1) if config["strategy"] == "one" else config["strategy"]
    parallel = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    loader = er.AdaptiveDataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH, drop_last=True)
    log = StepLog(Path(config["log"]))
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            context = er.get_context()
            if context.get_world_rank() == 0:
                log.append(world=context.get_world_size(), step=context.get_global_step())


class TiledJob(ElasticJob):
    """An elastic job under one strategy."""

    def __init__(self, folder: Path, *, workers: tuple[int, int], label: str) -> None:
        import ray.train

        import elastic_ray

        folder.mkdir(parents=True)
        self.name = label
        self.log = StepLog(folder / "steps")
        self.handle = elastic_ray.ElasticTrainer(
            train_loop,
            train_loop_config={"log": str(self.log.path), "strategy": STRATEGIES[label]},
            scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker=common.BUNDLE),
            run_config=ray.train.RunConfig(name=folder.name, storage_path=str(folder)),
            elastic_config=elastic_ray.ElasticConfig(automatic_checkpoints=False),
        ).submit()


def _one_job(label: str, folder: Path, *, times: int) -> dict[str, list[float]]:
    """Pauses of 2 -> 3 -> 4, several times, and of a SIGKILL of one of four."""
    found: dict[str, list[float]] = {}
    job = TiledJob(folder, workers=(1, WORLD), label=label)
    try:
        for _ in range(times):
            job.resize(2)
            trains(job, 2, time.time())
            for world in (3, 4):
                pause_s = pause_of(job, functools.partial(job.resize, world), world)
                found.setdefault(f"{world - 1}->{world}", []).append(pause_s)
        if label != "one owner":
            found["kill"] = [pause_of(job, lambda: os.kill(job.pids()[3], signal.SIGKILL), 3)]
    finally:
        job.stop()
    return found


def trains(job: Any, world: int, since_s: float) -> None:
    """Wait for some steps in a group of this size."""
    if not job.log.wait_for(world=world, steps=_STEPS, since_s=since_s, timeout_s=_WAIT_S):
        job.check()
        raise TimeoutError(f"{job.name}: no {_STEPS} steps with {world} workers in {_WAIT_S:g} s")


def pause_of(job: Any, act: Callable[[], object], world: int) -> float:
    """The pause that an act has led to, from the last step of one group to the readiness for the next one's first."""
    before, since_s = job.log.read()[-1].step, time.time()
    known = len(job.handle.events())
    act()

    def paused() -> list[float]:
        return [event.pause_s for event in job.handle.events()[known:] if event.to_workers == world and event.pause_s]

    if not common.wait_until(lambda: bool(paused()), _WAIT_S):  # a killed worker's replacement may come at once
        job.check()
        raise TimeoutError(f"{job.name}: no group of {world} workers in {_WAIT_S:g} s")
    common.wait_until(lambda: job.log.read()[-1].step > before + _STEPS, _WAIT_S)
    steps = [record.step for record in job.log.read() if record.time_s > since_s]
    assert steps[0] <= before + 1 and steps == sorted(steps), "no committed step is lost"
    print(f"  {job.name}: to {world} workers: pause {paused()[0]:.2f} s", flush=True)
    return paused()[0]


def _pauses(rows: list[dict[str, Any]], bars: list[dict[str, Any]], *, repeats: int) -> None:
    from scenarios import cluster

    measured: dict[str, dict[str, list[float]]] = {label: {} for label in STRATEGIES}
    with cluster(nodes=1, slots=WORLD) as _, tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for label, outcomes in measured.items():
                name = f"{label.replace(' ', '-')}-{number}"
                for event, pauses_s in _one_job(label, Path(folder) / name, times=min(2, repeats)).items():
                    outcomes.setdefault(event, []).extend(pauses_s)
    medians = {label: {event: median(each) for event, each in events.items()} for label, events in measured.items()}
    for label, events in medians.items():
        for event, pause_s in events.items():
            number = len(measured[label][event])
            rows.append({"what": f"pause {event} [s], median of {number}", "strategy": label, "value": pause_s})
    plain = medians["replicated"]
    for label, limit in (("one owner", 0.9), ("two owners", 1.0)):
        worst = max(medians[label][event] / plain[event] for event in ("2->3", "3->4"))
        bars.append(bar(f"join, {label} / replicated, the worse one", value=worst, limit=limit, at_least=False))
    killed = medians["two owners"]["kill"] / plain["kill"]
    bars.append(bar("kill, two owners / replicated", value=killed, limit=1.2, at_least=False))


if __name__ == "__main__":
    main()
