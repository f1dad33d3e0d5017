"""Our side: the same model under elastic_ray.ElasticTrainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import common
from common import StepLog


def train_loop(config: dict[str, Any]) -> None:
    """The plain loop; a step whose group was lost is not applied and not logged."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    model = common.build_model()
    optimizer = common.build_optimizer(model)
    parallel = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH, drop_last=True)
    log = StepLog(Path(config["log"]))
    weight = next(model.parameters())
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            before = weight._version
            optimizer.step()
            if weight._version == before:
                continue  # lost with a member, will be drawn again
            model.steps += 1
            context = er.get_context()
            if context.get_world_rank() == 0:
                log.append(world=context.get_world_size(), step=int(model.steps))


class ElasticJob:
    """An elastic job in the background, with the interface that the scenarios use for both sides.

    Attributes:
        name: of the system.
        loop: the train function.
        config: of the train function, beside the path of the log.
        options: of its ``ElasticConfig``.
    """

    name = "elastic-ray"
    loop: Callable[[dict[str, Any]], None] = staticmethod(train_loop)
    config: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}

    def __init__(self, folder: Path, *, workers: tuple[int, int]) -> None:
        """Start it: ``workers`` are its fewest and most, one CPU each."""
        import ray.train

        import elastic_ray

        folder.mkdir(parents=True)
        self.log = StepLog(folder / "steps")
        self.handle = elastic_ray.ElasticTrainer(
            type(self).loop,
            train_loop_config={"log": str(self.log.path), **self.config},
            scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker=common.BUNDLE),
            run_config=ray.train.RunConfig(name=folder.name, storage_path=str(folder)),
            elastic_config=elastic_ray.ElasticConfig(**self.options),
        ).submit()

    def resize(self, workers: int) -> None:
        """Hold the job at this many workers."""
        self.handle.resize(workers)

    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        return {worker.rank: worker.pid for worker in self.handle.workers()}

    def nodes(self) -> dict[int, str]:
        """Ray node id of each rank."""
        return {worker.rank: worker.node for worker in self.handle.workers()}

    def check(self) -> None:
        """Raise what ended the job, if something did."""
        status = self.handle.status()
        if status.phase.ended:
            self.handle.result(10.0)
            raise RuntimeError(f"the job is {status.phase.value} although its loop never ends")

    def stop(self) -> None:
        """End the job."""
        self.handle.stop()
