"""Names in the code of a train function that are those of modules, too."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from elastic_ray.worker.train_loop import pack


def test_attribute_may_be_called_as_module_of_torch_is() -> None:
    """``classes``, as of ``ImageFolder``; torch.classes is no ordinary module."""
    scope: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec("def train(config):\n    return torch.ones(2).sum().item() + len(config['data'].classes)", scope)
    train, config = pickle.loads(pack(scope["train"], {"data": 1}))

    class Digits:
        classes = "01"

    assert config == {"data": 1} and train({"data": Digits()}) == 4.0
