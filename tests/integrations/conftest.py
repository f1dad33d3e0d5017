"""What several frameworks' tests need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


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
