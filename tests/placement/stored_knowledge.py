"""Knowledge in a folder."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow.fs

from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster
from placement.knowledge.knowledge import Knowledge
from placement.knowledge.store import StorageRoot
from tests.placement.measured import measured
from tests.placement.views import node

NOW_S = time.time()


def knowing(*sizes: int, cpus: float = 8, at_s: float = NOW_S) -> Knowledge:
    knowledge = Knowledge()
    knowledge.machines(Cluster(nodes=(node("n0", cpus, labels={GPU_TYPE_LABEL: "T4"}),)))
    if sizes:
        knowledge.learn(measured("old", sizes), at_s)
    return knowledge


def root_at(path: Path, *, local: bool = True) -> StorageRoot:
    if local:
        return StorageRoot(path=str(path), filesystem=pyarrow.fs.LocalFileSystem())
    return StorageRoot(path="runs", filesystem=pyarrow.fs.SubTreeFileSystem(str(path), pyarrow.fs.LocalFileSystem()))
