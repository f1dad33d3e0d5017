"""Epochs of a job with a slow node."""

from __future__ import annotations

import collections
from pathlib import Path

from tests.job import traced

SAMPLES, WORKERS = 360, 3


def check_epochs(folder: Path) -> dict[tuple[int, int], int]:
    """Every complete epoch has each sample exactly once; returns samples by step and rank."""
    lines = [line for line in traced.read(folder / "trace") if line["kind"] == "step"]
    newest: dict[int, int] = collections.defaultdict(int)
    for line in lines:
        newest[line["step"]] = max(newest[line["step"]], line["generation"])
    drawn: dict[int, list[int]] = collections.defaultdict(list)
    sizes = {}
    for line in lines:
        if line["generation"] == newest[line["step"]]:
            drawn[line["epoch"]] += line["indices"]
            sizes[line["step"], line["rank"]] = len(line["indices"])
    for epoch in sorted(drawn)[:-1]:
        assert sorted(drawn[epoch]) == list(range(SAMPLES)), f"epoch {epoch}: not every sample exactly once"
    return sizes
