"""DataLoader worker processes send back what the script defines, and tell what they cannot send."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import ray.cloudpickle
import torch
from torch.utils.data import Dataset

import elastic_ray as er
from elastic_ray.run.current import set_session
from elastic_ray.worker import train_loop

SCRIPT = """
import dataclasses, sys, typing
import ray.cloudpickle, torch
from torch.utils.data import DataLoader, Dataset

class Item(typing.NamedTuple):
    x: torch.Tensor

@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: int

class NotThereError(Exception):
    pass

def collated(items):
    return Pair(torch.stack([each.x for each in items]), len(items))

class Items(Dataset):
    def __init__(self, fails):
        self.fails = fails
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if self.fails:
            raise NotThereError(f"item {index}")
        return Item(torch.ones(4))

def train(config):
    loader = DataLoader(Items(config == "fails"), batch_size=4, num_workers=1, timeout=100, collate_fn=config)
    return next(iter(loader))

sys.stdout.buffer.write(ray.cloudpickle.dumps((train, collated)))
"""


def test_classes_of_the_script_come_back() -> None:
    """A named tuple, a dataclass, an exception: the script's ``__main__`` defines them, and the loader's does not."""
    packed = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True).stdout
    train, collated = train_loop.load(packed)
    batch = train(collated)
    assert type(batch).__name__ == "Pair" and batch.y == 4
    assert type(train(list)[0]).__name__ == "Item"
    with pytest.raises(Exception, match="item 0") as failure:
        train("fails")
    assert type(failure.value).__name__ == "NotThereError"


def test_a_name_that_the_process_has_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    main: Any = sys.modules["__main__"]
    monkeypatch.setattr(main, "Theirs", "kept", raising=False)
    train_loop.load(ray.cloudpickle.dumps(type("Theirs", (), {"__module__": "__main__"})))
    assert main.Theirs == "kept"


class Unsendable(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return lambda: index


def read(dataset: Any, **options: Any) -> None:
    """Draw the batches of an epoch."""
    set_session(None)
    model = torch.nn.Linear(1, 1)
    er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = er.AdaptiveDataLoader(dataset, batch_size=4, num_workers=1, collate_fn=list, **options)
    for _ in er.remaining_epochs_until(1):
        for _batch in loader:
            pass


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [False, True], ids=["workers of a pass", "workers that stay"])
def test_a_batch_that_cannot_be_sent_is_an_error(kept: bool) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)process 0.*must return what can be pickled"):
        read(Unsendable(), persistent_workers=kept)


@pytest.mark.thorough
def test_a_worker_process_that_died_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        read(Dying())


class Dying(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        os._exit(3)
