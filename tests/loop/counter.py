"""State of a user's own."""

from __future__ import annotations

from typing import Any

import torch


class Counter:
    """What a metric or a curriculum keeps."""

    def __init__(self) -> None:
        self.steps, self.mean = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.mean = state["steps"], state["mean"]
