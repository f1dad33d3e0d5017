"""Rows/s that two workers read from a dataset of Ray Data, against Ray Train's ``streaming_split`` in the same run.

Parquet files of 64 numbers and a label a row; nothing but reading: batches of tensors, 4096 rows a worker, two epochs.
Both systems run on the same cluster in turn, and the medians of the turns are compared, over the second epoch: as a
whole, and from its first batch on. What comes before that is Ray Data's own start of an execution and the first block.
Bar: at least 0.95 x the rows/s of Ray Train, both ways.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, bar, finish, median

from tests.local_cluster import LocalCluster, clean_up

WORKERS = 2
FEATURES = 64
LOCAL_BATCH = 4096
EPOCHS = 2
FILES = 16
SYSTEMS = ("ray-train", "elastic-ray")


def write_files(folder: Path, rows: int) -> str:
    """Parquet files with so many rows in all; returns their folder."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    dice = np.random.default_rng(0)
    each = rows // FILES
    for file in range(FILES):
        values = pa.array(dice.standard_normal(each * FEATURES, dtype=np.float32))
        features = pa.FixedSizeListArray.from_arrays(values, FEATURES)
        table = pa.table({"x": features, "y": np.arange(file * each, (file + 1) * each) % 10})
        pq.write_table(table, folder / f"{file:02}.parquet", row_group_size=8192, compression="none")
    return str(folder)


class Notes:
    """When a worker had its batches in each epoch, in a file of its own."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = Path(folder) / f"rank-{rank}"
        self.start()

    def start(self) -> None:
        """An epoch begins."""
        self._began_s, self._first_s = time.time(), 0.0
        self._rows = self._later = 0

    def batch(self, rows: int) -> None:
        """A batch is there; the rows after the first one's are counted by themselves as well."""
        self._rows += rows
        self._later += rows if self._first_s else 0
        self._first_s = self._first_s or time.time()

    def end(self) -> None:
        """The epoch is over."""
        note = {
            "began": self._began_s,
            "first": self._first_s,
            "last": time.time(),
            "rows": self._rows,
            "later": self._later,
        }
        with self._file.open("a") as file:
            file.write(json.dumps(note) + "\n")


def elastic_loop(config: dict[str, Any]) -> None:
    """Our side."""
    import elastic_ray as er

    loader = er.AdaptiveDataLoader(er.get_dataset_shard("train"), batch_size=LOCAL_BATCH * WORKERS)
    notes = Notes(config["notes"], er.get_context().get_world_rank())
    for _ in er.remaining_epochs_until(EPOCHS):
        notes.start()
        for batch in loader:
            notes.batch(len(batch["y"]))
        notes.end()


def ray_train_loop(config: dict[str, Any]) -> None:
    """Ray Train's side."""
    import ray.train

    shard: Any = ray.train.get_dataset_shard("train")
    notes = Notes(config["notes"], ray.train.get_context().get_world_rank())
    for _ in range(EPOCHS):
        notes.start()
        for batch in shard.iter_torch_batches(batch_size=LOCAL_BATCH):
            notes.batch(len(batch["y"]))
        notes.end()


def measure(system: str, data: str) -> dict[str, Any]:
    """One turn of one system."""
    import ray.data
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    import elastic_ray as er

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    scaling = ray.train.ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1})
    common: dict[str, Any] = {
        "train_loop_config": {"notes": str(folder)},
        "scaling_config": scaling,
        "run_config": ray.train.RunConfig(storage_path=str(folder / "runs")),
        "datasets": {"train": ray.data.read_parquet(data)},
    }
    if system == "elastic-ray":
        er.ElasticTrainer(elastic_loop, **common).submit().result(timeout=300)
    else:
        TorchTrainer(ray_train_loop, torch_config=TorchConfig(backend="gloo"), **common).fit()
    files = sorted(folder.glob("rank-*"))
    assert len(files) == WORKERS, files
    last = [json.loads(file.read_text().splitlines()[EPOCHS - 1]) for file in files]
    ended_s = max(note["last"] for note in last)
    took_s = ended_s - min(note["began"] for note in last)
    read_s = ended_s - min(note["first"] for note in last)
    return {
        "system": system,
        "rows/s": sum(note["rows"] for note in last) / took_s,
        "rows/s from the first batch": sum(note["later"] for note in last) / read_s,
        "epoch [s]": took_s,
        "first batch [s]": took_s - read_s,
    }


def main() -> None:
    """Both systems in turns on one cluster; the first turn of each is not counted."""
    options = arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    failed = True
    try:
        cluster = LocalCluster(num_cpus=2 * WORKERS, object_store_memory=1 << 30)
        try:
            data = write_files(Path(tempfile.mkdtemp(prefix="bench-")) / "data", 160_000 if options.quick else 800_000)
            for turn in range(options.repeats + (not options.quick)):
                for system in SYSTEMS:
                    if options.side in ("both", system):
                        row = measure(system, data)
                        print(f"  {row}", flush=True)
                        rows += [row] if turn or options.quick else []
        finally:
            cluster.shutdown()
        failed = False
    finally:
        clean_up(failed=failed)

    def share(column: str) -> float | None:
        ours, theirs = (median(row[column] for row in rows if row["system"] == system) for system in SYSTEMS[::-1])
        return ours / theirs if ours and theirs else None

    bars = [
        bar(f"{column}, as a multiple of Ray Train's streaming_split", value=share(column), limit=0.95, at_least=True)
        for column in ("rows/s", "rows/s from the first batch")
    ]
    finish("ray_data", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
