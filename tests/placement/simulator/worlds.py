"""A tiny profile folder and traces, made up, for tests of the simulator; and where the published data are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def data() -> Path:
    """The published traces and profiles; skips the test where they are not."""
    folder = Path(os.environ.get("ELASTIC_RAY_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "profiles").is_dir():
        pytest.skip(f"published traces and profiles are not at {folder}; set ELASTIC_RAY_DATA")
    return folder


def write(path: Path, header: str, rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def step_s(nodes: int, replicas: int, local: float, link: float = 1.0) -> tuple[float, float]:
    """Made-up truth: 1 ms a sample, 10 ms for a second GPU, 20 ms more for a second node, times ``link``."""
    sync = link * ((0.010 if replicas > 1 else 0.0) + (0.020 if nodes > 1 else 0.0))
    return 0.02 + 0.001 * local + sync, sync


def profiles(
    folder: Path,
    names: Sequence[str] = ("toy",),
    gpus: Sequence[str] = ("t4",),
    epochs: int = 4,
    link: float = 1.0,
) -> Path:
    """Profiles of applications that differ in name only; every later GPU type is twice as fast as the one before."""
    for name in names:
        for speed, gpu in enumerate(gpus):
            times = {
                (counts, local): [t / 2**speed for t in step_s(len(counts), sum(map(int, counts)), local, link)]
                for counts in ("1", "2", "3", "4", "11", "22", "33", "44")
                for local in (8, 16, 32, 64)
            }
            rows = [(counts, local, *t) for (counts, local), t in times.items()]
            write(folder / name / f"placements-{gpu}.csv", "placement,local_bsz,step_time,sync_time", rows)
            scale = [
                (n, r, local, *[t / 2**speed for t in step_s(n, r, local, link)])
                for n, r in ((3, 12), (4, 16), (3, 3), (4, 4))
                for local in (8, 16, 32, 64)
            ]
            header = "num_nodes,num_replicas,local_bsz,step_time,sync_time"
            write(folder / name / f"scalability-{gpu}.csv", header, scale)
        for batch in (32, 128, 512):
            curve = [(1000.0 * (e + 1), 32000 // batch * (e + 1), 0.1 * e, 1.0 / (e + 1), 4.0) for e in range(epochs)]
            header = "progress,iteration,metric,grad_sqr,grad_var"
            write(folder / name / f"validation-{batch}.csv", header, curve)
    return folder


def trace(path: Path, jobs: Sequence[tuple[str, float, str, int, int]]) -> Path:
    write(path, "name,time,application,num_replicas,batch_size", jobs)
    return path
