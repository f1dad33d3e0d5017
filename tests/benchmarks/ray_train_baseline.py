"""The alternative: Ray Train's own elastic mode, running the same model with a checkpoint every ten steps.

Run by itself, it prints the baseline's numbers for every event (`--only join,kill,node,hang`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from common import StepLog


def train_loop(config: dict[str, Any]) -> None:
    """As Ray Train's guide to elastic training has it: restore, train, report with a checkpoint."""
    import ray.train.torch

    rank, world = join_group(config)
    model = common.build_model()
    optimizer = common.build_optimizer(model)
    _restore(model, optimizer)
    parallel = ray.train.torch.prepare_model(model)
    train_on(config, model, parallel, optimizer, rank=rank, world=world, report=lambda: _report(model, optimizer, rank))


def train_on(
    config: dict[str, Any],
    model: Any,
    call: Callable[[Any], Any],
    optimizer: Any,
    *,
    rank: int,
    world: int,
    report: Callable[[], None],
) -> None:
    """Train, with a report every ten steps, until a file says which step is the last.

    Args:
        config: paths of the log of steps and of that file.
        model: counts its steps.
        call: the model, as it is called.
        optimizer: of it.
        rank: of this worker.
        world: workers.
        report: reports, with a checkpoint.
    """
    import torch

    batches = torch.utils.data.DataLoader(
        common.Rows(), batch_size=common.GLOBAL_BATCH // world, shuffle=True, drop_last=True
    )
    log = StepLog(Path(config["log"]))
    while True:
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(call(x), y).backward()
            optimizer.step()
            model.steps += 1
            if rank == 0:
                log.append(world=world, step=int(model.steps))
            if int(model.steps) % common.CHECKPOINT_EVERY == 0:
                report()
                last = Path(config["last"])
                if last.exists() and int(model.steps) >= int(last.read_text()):
                    return


def join_group(config: dict[str, Any]) -> tuple[int, int]:
    """Note which process is which rank of the group; returns the rank and the world size."""
    import ray
    import ray.train
    import torch

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    with Path(config["members"]).open("a") as file:
        file.write(f"{time.time():.6f} {world} {rank} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
    return rank, world


def _restore(model: Any, optimizer: Any) -> None:
    import ray.train
    import torch

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


def _report(model: Any, optimizer: Any, rank: int) -> None:
    import ray.train
    import torch

    metrics = {"steps": int(model.steps)}
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


class RayTrainJob:
    """A Ray Train run in the background, with the interface that the scenarios use for both sides.

    Attributes:
        name: of the system.
        loop: the train function.
    """

    name = "Ray Train"
    loop: Callable[[dict[str, Any]], None] = staticmethod(train_loop)

    def __init__(self, folder: Path, *, workers: tuple[int, int]) -> None:
        """Start it: ``workers`` are its fewest and most, one CPU each."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        folder.mkdir(parents=True)
        self.log = StepLog(folder / "steps")
        self._members = folder / "members"
        self._last = folder / "last"
        head = ray.get_runtime_context().get_node_id()
        strategy = NodeAffinitySchedulingStrategy(node_id=head, soft=False)
        config = {"log": str(self.log.path), "members": str(self._members), "last": str(self._last)}
        driver = ray.remote(num_cpus=0)(_Driver).options(scheduling_strategy=strategy)
        self._driver = driver.remote()
        self._fit = self._driver.fit.remote(type(self).loop, config, workers, str(folder))  # type: ignore[attr-defined]

    def pids(self) -> dict[int, int]:
        """Process id of each rank of the youngest group."""
        rows = [line.split() for line in self._members.read_text().splitlines()]
        world = int(rows[-1][1])
        return {int(rank): int(pid) for _, _, rank, pid, _ in rows[-world:]}

    def nodes(self) -> dict[int, str]:
        """Ray node id of each rank of the youngest group."""
        rows = [line.split() for line in self._members.read_text().splitlines()]
        world = int(rows[-1][1])
        return {int(rank): node for _, _, rank, _, node in rows[-world:]}

    def check(self) -> None:
        """Raise what ended the run, if something did."""
        import ray

        done, _ = ray.wait([self._fit], timeout=0)
        if done:
            ray.get(self._fit)
            raise RuntimeError("the Ray Train run ended although its loop never does")

    def end(self) -> None:
        """Let the loop come to its end, so that its resources are free: a driver that is killed leaves its bundles."""
        import ray

        writing = self._last.with_suffix(".new")
        writing.write_text(str(self.log.read()[-1].step + 4 * common.CHECKPOINT_EVERY))  # ahead of every rank
        writing.rename(self._last)
        ray.get(self._fit, timeout=60.0)
        self.stop()

    def stop(self) -> None:
        """End the run with everything that it owns."""
        import ray

        ray.kill(self._driver)


class _Driver:
    """Calls ``fit``, which blocks, in a process of its own; its death takes the run with it."""

    def fit(
        self, loop: Callable[[dict[str, Any]], None], config: dict[str, Any], workers: tuple[int, int], storage: str
    ) -> None:
        import ray.train
        import ray.train.torch

        ray.train.torch.TorchTrainer(
            loop,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(  # type: ignore[call-arg]
                num_workers=workers if workers[0] != workers[1] else workers[0],
                resources_per_worker=common.BUNDLE,
                elastic_resize_monitor_interval_s=1.0,
            ),
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            run_config=ray.train.RunConfig(
                name="baseline",
                storage_path=storage,
                failure_config=ray.train.FailureConfig(max_failures=-1),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
