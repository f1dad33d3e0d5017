"""A small made-up trace, with the profiles of its applications: what the simulator shows without published files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

CLUSTER = "t4:2x4"

_PLACES = ("1", "2", "3", "4", "11", "22", "33", "44")  # workers on each node
_BATCHES = (8, 16, 32, 64)
# Seconds a sample, samples of an epoch, gradient variance over its squared norm: what an application gains by workers.
_APPLICATIONS = {"image": (0.002, 64_000, 4.0), "text": (0.008, 32_000, 16.0)}
_EPOCHS = 6


def write_demo(folder: Path) -> tuple[Path, Path]:
    """Write the files below an empty folder.

    Returns:
        The trace, and the folder of profiles.
    """
    profiles = folder / "profiles"
    for name, (sample_s, samples, variance) in _APPLICATIONS.items():
        placed = [(p, m, *_step_s(len(p), sum(map(int, p)), m, sample_s)) for p in _PLACES for m in _BATCHES]
        _write(profiles / name / "placements-t4.csv", "placement,local_bsz,step_time,sync_time", placed)
        sizes = [(n, r) for n in (3, 4) for r in (n, 4 * n)]
        larger = [(n, r, m, *_step_s(n, r, m, sample_s)) for n, r in sizes for m in _BATCHES]
        _write(profiles / name / "scalability-t4.csv", "num_nodes,num_replicas,local_bsz,step_time,sync_time", larger)
        for batch in (32, 128, 512):
            epochs = [(1000.0 * e, samples // batch * e, 0.1 * e, 1.0 / e, variance) for e in range(1, _EPOCHS + 1)]
            _write(profiles / name / f"validation-{batch}.csv", "progress,iteration,metric,grad_sqr,grad_var", epochs)
    kinds = [("image", "text")[i % 3 == 2] for i in range(16)]
    jobs = [(f"{kind}-{i}", 180 * i, kind, 1 + i % 2, 128) for i, kind in enumerate(kinds)]
    _write(folder / "demo.csv", "name,time,application,num_replicas,batch_size", jobs)
    return folder / "demo.csv", profiles


def _step_s(nodes: int, workers: int, batch: int, sample_s: float) -> tuple[float, float]:
    """Time of a step, and of its synchronisation: 10 ms for a second worker, 20 ms more for a second node [s]."""
    sync_s = 0.01 * (workers > 1) + 0.02 * (nodes > 1)
    return 0.02 + sample_s * batch + sync_s, sync_s


def _write(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
