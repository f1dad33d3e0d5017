"""An elastic job on a dataset of Ray Data: Parquet files, read and prepared once for all workers.

Makes the files, and trains a small net on them while the job grows from one worker to three and loses one to `kill -9`.
Each epoch uses every row exactly once, or the job fails. Needs `pip install -e ".[ray-data]"`, and takes about a minute
on two cores:

    python examples/ray_data_parquet.py
    python examples/ray_data_parquet.py --smoke      fewer rows, two epochs, no kill
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

# A cluster for this program alone, on loopback: no token, and no other address.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
import ray.train
from watched_job import run

import elastic_ray as er

FILES, FEATURES = 4, 16


def write_files(folder: Path, rows: int) -> str:
    """Rows with a number, features and a label, in some Parquet files; returns their folder."""
    folder.mkdir()
    dice = np.random.default_rng(0)
    for numbers in np.array_split(np.arange(rows), FILES):
        features = dice.standard_normal((len(numbers), FEATURES), dtype=np.float32)
        label = (features.sum(1) > 0).astype(np.int64)
        table = pa.table({"number": numbers, "features": features.tolist(), "label": label})
        pq.write_table(table, folder / f"{numbers[0]:05}.parquet")
    return str(folder)


def scale(batch: dict[str, Any]) -> dict[str, Any]:
    """What is prepared once, by tasks of Ray Data, whatever the number of workers."""
    return {**batch, "features": np.stack(batch["features"]).astype(np.float32) / 2}


def train(config: dict[str, Any]) -> None:
    """Train a small net; a step takes as long as one of a larger net on an accelerator would."""
    import torch

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(er.get_dataset_shard("train"), batch_size=64)
    rows = config["rows"]
    for epoch in er.remaining_epochs_until(config["epochs"]):
        sums = er.Accumulator()
        for batch in loader:
            optimizer.zero_grad()
            output = model(batch["features"])
            torch.nn.functional.cross_entropy(output, batch["label"]).backward()
            optimizer.step()
            time.sleep(config["step_s"])
            sums["rows"] += len(batch["label"])
            sums["numbers"] += float(batch["number"].sum())
            sums["right"] += float((output.argmax(1) == batch["label"]).sum())
        assert sums["rows"] == rows and sums["numbers"] == sum(range(rows)), "a row was left out, or used twice"
        er.report({"epoch": epoch, "rows": sums["rows"], "accuracy": sums["right"] / rows})


def make_trainer(folder: str, smoke: bool) -> er.ElasticTrainer:
    """The job, on files of its own."""
    rows = 1600 if smoke else 8000
    dataset = ray.data.read_parquet(write_files(Path(folder) / "data", rows)).map_batches(scale).random_shuffle()
    return er.ElasticTrainer(
        train,
        train_loop_config={"rows": rows, "epochs": 2 if smoke else 4, "step_s": 0.1 if smoke else 0.2},
        # Three of the cluster's four CPUs: with none left for Ray Data's tasks nothing would be read.
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3)),
        run_config=ray.train.RunConfig(name="parquet", storage_path=folder),
        datasets={"train": dataset},
    )


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", "parquet", make_trainer, lambda metrics, smoke: metrics["accuracy"] > 0.7))
