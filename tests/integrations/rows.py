"""Train functions that write down which rows each step has used; jobs and checks for the tests beside it."""

from __future__ import annotations

import collections
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import elastic_ray as er

FILES, ROWS = 6, 40
BATCH = 16


def write_files(folder: Path) -> str:
    """Parquet files with rows ``id`` 0..239 in order; returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(FILES):
        ids = np.arange(file * ROWS, (file + 1) * ROWS)
        table = pa.table({"id": ids, "x": ids / 100.0, "word": [f"w{each}" for each in ids]})
        pq.write_table(table, folder / f"{file}.parquet")
    return str(folder)


class NoteReads:
    """Writes down, in a file of each task, which rows Ray Data has read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        with (Path(self.folder) / f"{os.getpid()}").open("a") as file:
            file.write(" ".join(map(str, batch["id"])) + "\n")
        return batch


def train(config: dict[str, Any]) -> None:
    """Train on the rows; each committed step's rows go into a file of this worker."""
    import torch

    model: Any = torch.nn.Linear(1, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(er.get_dataset_shard("train"), batch_size=BATCH)
    trace = Path(config["trace"]) / f"{os.getpid()}-{time.monotonic_ns()}"
    pause = Path(config["trace"]) / "pause"
    with trace.open("a", buffering=1) as written:
        for epoch in er.remaining_epochs_until(config["epochs"]):
            for batch in loader:
                optimizer.zero_grad()
                model(batch["x"].float()[:, None]).square().mean().backward()
                step = er.get_context().get_global_step()
                optimizer.step()
                context = er.get_context()
                used = {"epoch": epoch, "step": step, "rank": context.get_world_rank()}
                used["generation"] = context.get_generation()
                written.write(json.dumps({**used, "rows": batch["id"].tolist()}) + "\n")
                if pause.exists():
                    # as long as the test asks, so that a change falls into the training
                    time.sleep(float(pause.read_text() or 0))
            found = {"epoch": epoch, **(evaluate() if config["valid"] else {})}
            er.report(found)


def evaluate() -> dict[str, float]:
    """A pass over the other dataset, shared among the workers: how many rows, and the sum of their numbers."""
    held_out = er.AdaptiveDataLoader(er.get_dataset_shard("valid"), batch_size=4, shuffle=False)
    sums = er.Accumulator()
    for batch in held_out:
        sums["rows"] += len(batch["id"])
        sums["sum"] += float(batch["id"].sum())
    return {"rows": sums["rows"], "sum": sums["sum"], "steps": len(held_out)}


def used_rows(trace: Path) -> dict[int, dict[int, list[int]]]:
    """Rows of each step of each epoch, by rank: as the newest group that took the step has used them."""
    newest: dict[tuple[int, int], tuple[int, dict[int, list[int]]]] = {}
    for file in trace.glob("*-*"):
        for line in file.read_text().splitlines():
            note = json.loads(line)
            step = note["epoch"], note["step"]
            if step not in newest or newest[step][0] < note["generation"]:
                newest[step] = note["generation"], {}
            if newest[step][0] == note["generation"]:
                newest[step][1][note["rank"]] = note["rows"]
    steps: dict[int, dict[int, list[int]]] = collections.defaultdict(dict)
    for (epoch, step), (_, ranks) in newest.items():
        steps[epoch][step] = [row for rank in sorted(ranks) for row in ranks[rank]]
    return steps


def order(steps: dict[int, list[int]]) -> list[int]:
    """All rows of an epoch, in the order of its steps."""
    return [row for step in sorted(steps) for row in steps[step]]
