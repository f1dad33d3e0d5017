"""Ray Train's own functions in the loop of an elastic job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from elastic_ray.worker.train_loop import call, pack


@pytest.fixture(autouse=True)
def own_session() -> Any:
    """Each test runs alone."""
    set_session(None)
    yield
    set_session(None)


def test_a_loop_in_ray_train_s_words() -> None:
    def loop(config: dict[str, Any]) -> list[Any]:
        assert ray.train.get_checkpoint() is None and ray.train.get_preemption_info() is None
        context = ray.train.get_context()
        for _ in er.remaining_epochs_until(1):
            for _batch in er.AdaptiveDataLoader(TensorDataset(torch.arange(4)), batch_size=2):
                pass
            ray.train.report({"loss": config["loss"]}, checkpoint=None)
        found = [context.get_world_rank(), context.get_world_size(), context.get_local_rank()]
        found += [context.get_local_world_size(), context.get_node_rank(), context.get_experiment_name()]
        return [*found, ray.train.torch.get_device().type]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert call(pack(loop, {"loss": 0.5})) == [0, 1, 0, 1, 0, "local", device]
    assert current_session().controller.metrics == {"loss": 0.5}  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="outside of a Ray Train training function"):
        ray.train.get_context()


@pytest.mark.parametrize(
    ("asks", "error", "words"),
    [
        (
            lambda: ray.train.torch.prepare_model(nn.Linear(1, 1), parallel_strategy="fsdp"),
            RuntimeError,
            "holds the whole model",
        ),
        (
            lambda: ray.train.torch.prepare_data_loader(DataLoader([1]), move_to_device=False),
            RuntimeError,
            "elastic_ray.AdaptiveDataLoader",
        ),
        (lambda: trains_without_optimizer(), RuntimeError, "there is none: make it before the loop over epochs"),
        (lambda: ray.train.get_dataset_shard("train"), RuntimeError, r"datasets=\{\.\.\.\}\): without a trainer"),
        (lambda: ray.train.report({}, checkpoint_dir_name="mine"), ValueError, "checkpoint_dir_name"),
        (lambda: ray.train.get_context().get_storage(), AttributeError, "'get_storage' in an elastic job; it has get_"),
    ],
)
def test_what_has_no_meaning_is_refused(asks: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(pack(lambda: asks(), None))


def trains_without_optimizer() -> None:
    ray.train.torch.prepare_model(nn.Linear(1, 1))
    for _ in er.remaining_epochs_until(1):
        pass


_FIRST_IMPORT = """
import sys
import elastic_ray
from elastic_ray.worker.in_ray_train import in_ray_train

assert "ray.train" not in sys.modules, "this is to be the first import"
with in_ray_train():
    import ray.train
    ray.train.report({"lr": 0.5})
    import ray.train.torch
    import torch
    from torch.utils.data import DataLoader

    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    loader = ray.train.torch.prepare_data_loader(DataLoader([1.0]))
    assert [type(each).__name__ for each in (model, loader)] == ["RayTrainModel", "RayTrainLoader"], (model, loader)
print(elastic_ray.loop.api.current_session().controller.metrics)
"""


@pytest.mark.thorough
def test_a_loop_that_imports_ray_train_itself_finds_ours() -> None:
    answer = subprocess.run([sys.executable, "-c", _FIRST_IMPORT], capture_output=True, text=True, timeout=180)
    assert answer.stdout.strip() == "{'lr': 0.5}", answer.stderr


def test_stored_files_are_deleted_where_the_loop_asks(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> list[bool]:
        found = []
        for stored in (None, "s3/run/checkpoint_000001"):
            (tmp_path / "mine").mkdir(exist_ok=True)
            for _ in er.remaining_epochs_until(1):
                for _batch in er.AdaptiveDataLoader(TensorDataset(torch.arange(4)), batch_size=2):
                    pass
            vars(current_session().controller)["stored"] = stored  # what a worker's has found out
            checkpoint = ray.train.Checkpoint(str(tmp_path / "mine"))
            ray.train.report({}, checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)
            found.append((tmp_path / "mine").exists())
        return found

    assert call(pack(loop, {})) == [True, False]
