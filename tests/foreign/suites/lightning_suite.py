"""A pytest plugin: Lightning's own tests train with elastic-ray's strategy wherever they leave the strategy open."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as lightning
import pytest

from elastic_ray.integrations.lightning import ElasticRayStrategy
from elastic_ray.run.current import set_session

_init = lightning.Trainer.__init__


@functools.wraps(_init)
def _with_our_strategy(trainer: Any, *args: Any, **options: Any) -> None:
    if (
        options.get("strategy", "auto") == "auto"
        and options.get("accelerator", "auto") in ("auto", "cpu")
        and options.get("devices", "auto") in ("auto", 1)
        and options.get("num_nodes", 1) == 1
    ):
        options |= {"strategy": ElasticRayStrategy(), "accelerator": "cpu", "devices": 1}
        options.setdefault("use_distributed_sampler", False)
    _init(trainer, *args, **options)


lightning.Trainer.__init__ = _with_our_strategy


@pytest.fixture(autouse=True)
def own_run() -> Iterator[None]:
    """Each test is a run of its own."""
    set_session(None)
    yield
    set_session(None)
