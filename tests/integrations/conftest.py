"""What several frameworks' tests need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def lightning_begins_on_rank_0() -> Iterator[None]:
    """Workers are threads in many tests, and which of them Lightning takes for the process is left to chance."""
    yield
    theirs = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if theirs is not None:
        theirs.rank_zero_only.rank = 0


@pytest.fixture
def one_state_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are threads here, and what accelerate keeps for a process must outlive each of their trainers."""
    state = importlib.import_module("accelerate.state")
    for name in ("AcceleratorState", "PartialState"):
        monkeypatch.setattr(getattr(state, name), "_reset_state", staticmethod(lambda *args, **options: None))


@pytest.fixture
def new_scaler() -> Iterator[Callable[[], torch.amp.GradScaler]]:
    """Makes gradient scalers that are of no effect once the test is over.

    A lost worker's group is kept for a while, and the scaler with it; Ray Train's loops take what the process holds.
    """
    made: list[torch.amp.GradScaler] = []

    def new() -> torch.amp.GradScaler:
        made.append(torch.amp.GradScaler("cpu"))
        return made[-1]

    yield new
    for each in made:
        each._enabled = False
