"""What a train function returns, raises and reports is unpickled by its user's own processes, never by a controller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.errors import TrainFunctionError
from tests.job.controllers import controller_pid
from tests.job.jobs import wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]


class Opened:
    """Leaves the number of every process that unpickles it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        (Path(folder) / f"opened-by-{os.getpid()}").touch()

    def __reduce__(self) -> Any:
        return type(self), (self.folder,)


class OpenedError(ValueError):
    def __reduce__(self) -> Any:
        return OpenedError, (Opened(self.args[0]).folder,)

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        Opened(folder)


def train(config: dict[str, Any]) -> Any:
    import time

    import torch

    data = torch.utils.data.TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
    model: Any = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=8)
    folder = Path(config["folder"])
    for epoch in er.remaining_epochs_until(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if epoch == 1:
            (folder / f"worker-{os.getpid()}").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)
            if config["how"] == "raise":
                raise OpenedError(config["folder"])
            er.report({"epoch": epoch, "what": Opened(config["folder"]) if config["how"] == "report" else None})
    return Opened(config["folder"])


def numbers(folder: Path, what: str) -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{what}-*")}


SLOW = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize("how", [pytest.param("return", marks=SLOW), pytest.param("raise", marks=SLOW), "report"])
def test_a_controller_unpickles_nothing_of_the_users(ray_cluster: Any, tmp_path: Path, how: str) -> None:
    handle = er.ElasticTrainer(
        train,
        train_loop_config={"folder": str(tmp_path), "how": how},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path / "runs")),
    ).submit()
    wait_until(lambda: bool(numbers(tmp_path, "worker")), handle)
    controller = controller_pid(handle)
    (tmp_path / "go").touch()
    match how:
        case "return":
            assert isinstance(handle.result(timeout=180).return_value, Opened)
        case "raise":
            with pytest.raises(OpenedError) as caught:
                handle.result(timeout=180)
            assert isinstance(caught.value, TrainFunctionError) and caught.value.rank == 0
            assert f"OpenedError: {tmp_path}" in handle.events()[-1].reason
        case "report":
            with pytest.raises(TypeError, match=r"metrics\['what'\] is a .*Opened"):
                handle.result(timeout=180)
    opened, own = numbers(tmp_path, "opened-by"), numbers(tmp_path, "worker") | {os.getpid()}
    assert controller not in opened and opened <= own
    assert (os.getpid() in opened) == (how != "report")
