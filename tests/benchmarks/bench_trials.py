"""200 short elastic trials in one sweep of Ray Tune: what is left behind, and whether deciding gets dearer.

Four at a time on four logical slots, each two epochs of a few steps. Before the sweep and after it are counted:
actors and placement groups of ours, the files that the long-lived processes (driver, allocator) hold open, the ports
they listen on, files in the temporary folder outside Ray's own logs. The CPU time of the allocator's process per
trial is compared between the second fifty trials and the last fifty. Bars: nothing is left; at most 1.3 x the CPU
time.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import bar, finish, side_parser, wait_until

from tests.local_cluster import LocalCluster, clean_up

SLOTS = 4
SETTLE_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the long-lived processes hold."""

    processes: int
    open_files: int
    ports: int
    temporary: int

    def row(self, when: str) -> dict[str, Any]:
        """A line of the printed table."""
        return {"when": when, **dataclasses.asdict(self)}


def loop(config: dict[str, Any]) -> None:
    """Two epochs of four steps."""
    import torch

    import elastic_ray as er

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(32, 4)), batch_size=8)
    for epoch in er.remaining_epochs_until(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        er.report({"score": config["lr"], "epoch": epoch})


def allocator_pid() -> int:
    """Process of the allocator."""
    import ray

    from placement.ray_cluster.named_actors import ALLOCATOR, NAMESPACE

    actor: Any = ray.get_actor(ALLOCATOR, namespace=NAMESPACE)
    state = ray._private.state.state.actor_table(actor._actor_id.hex(), None, None)
    return int(state["Pid"])


def held(allocator: int) -> Held:
    """What is held now."""
    long_lived = [psutil.Process(), psutil.Process(allocator)]
    ours = [each for each in psutil.Process().children(recursive=True) if not _is_idle(each)]
    return Held(
        processes=len(ours),
        open_files=sum(process.num_fds() for process in long_lived),
        ports=sum(_listening(process) for process in [*long_lived, *ours]),
        temporary=sum(1 for path in Path(tempfile.gettempdir()).iterdir() if not path.name.startswith("er-")),
    )


def _is_idle(process: psutil.Process) -> bool:
    """Ray starts and ends idle workers of its own as it likes; each of them listens on a port."""
    try:
        return "ray::IDLE" in " ".join(process.cmdline())
    except psutil.Error:
        return True


def _listening(process: psutil.Process) -> int:
    try:
        return sum(1 for each in process.net_connections() if each.status == psutil.CONN_LISTEN)
    except psutil.Error:
        return 0


def sweep(folder: str, trials: int, clock: list[tuple[float, float]], allocator: list[int]) -> None:
    """A sweep; notes (time, CPU time of the allocator) at the end of every trial."""
    import ray.train
    from ray import tune

    import tuning

    class Note(tune.Callback):
        def on_trial_complete(self, **_: Any) -> None:
            allocator[:] = allocator or [allocator_pid()]
            times = psutil.Process(allocator[0]).cpu_times()
            clock.append((time.time(), times.user + times.system))

    scaling = ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"slot": 1})
    grid = tune.Tuner(
        tuning.elastic(loop, scaling_config=scaling, sweep="bench"),
        param_space={"lr": tune.uniform(0.0, 0.1)},
        tune_config=tune.TuneConfig(
            metric="score", mode="max", num_samples=trials, max_concurrent_trials=SLOTS, reuse_actors=True
        ),
        run_config=tune.RunConfig(storage_path=folder, verbose=0, callbacks=[Note()]),
    ).fit()
    if grid.errors:
        raise RuntimeError(f"{len(grid.errors)} trials failed; the first: {grid.errors[0]}")


def main() -> None:
    """A small sweep, so that what stays for good is there; then the measured one."""
    options = side_parser(__doc__ or "", sides=False).parse_args()
    trials = 20 if options.quick else 200
    failed = True
    local = LocalCluster(num_cpus=4, resources={"slot": SLOTS}, _system_config=None)
    try:
        with tempfile.TemporaryDirectory(prefix="er-bench-", ignore_cleanup_errors=True) as folder:
            allocator: list[int] = []
            sweep(folder, SLOTS, [], allocator)
            wait_until(lambda: not local.leaks(), SETTLE_S)
            before = held(allocator[0])
            clock: list[tuple[float, float]] = []
            begin_s = time.time()
            sweep(folder, trials, clock, allocator)
            took_s = time.time() - begin_s
            wait_until(lambda: not local.leaks() and held(allocator[0]).processes <= before.processes, SETTLE_S)
            after, leaks = held(allocator[0]), local.leaks()
        failed = False
    finally:
        local.shutdown()
        clean_up(failed=failed)
    quarter = trials // 4
    early, late = ((clock[b - 1][1] - clock[a][1]) / (b - 1 - a) for a, b in ((quarter, 2 * quarter), (-quarter, 0)))
    print(f"{trials} trials in {took_s:.1f} s; CPU time of the allocator per trial: {early:.3f} s, then {late:.3f} s")
    finish("trials", rows=[before.row("before"), after.row("after")], bars=bars(leaks, before, after, late / early))


def bars(leaks: list[str], before: Held, after: Held, growth: float) -> list[dict[str, Any]]:
    """What must be reached."""
    for leak in leaks:
        print(f"  left: {leak}")
    return [
        bar("actors and placement groups left", value=len(leaks), limit=0, at_least=False),
        bar("listening ports left", value=after.ports - before.ports, limit=0, at_least=False),
        bar(
            "open files left in driver and allocator",
            value=after.open_files - before.open_files,
            limit=8,
            at_least=False,
        ),
        bar("temporary files left", value=after.temporary - before.temporary, limit=0, at_least=False),
        bar("allocator's CPU time per trial, last over second quarter", value=growth, limit=1.3, at_least=False),
    ]


if __name__ == "__main__":
    main()
