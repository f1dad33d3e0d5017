"""An elastic job on a dataset of Ray Data: Parquet files, read and prepared once for all workers.

Makes the files, trains a small net on them while the job grows from one worker to two and loses one to `kill -9`, and
shows that each epoch has used every row exactly once. Takes about a minute on two cores:

    python examples/ray_data_parquet.py
    python examples/ray_data_parquet.py --smoke      fewer rows, two epochs
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread per worker, for they share two cores; read when torch is imported, here and in workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A cluster for this program alone, on loopback: no token, and no other address.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import ray.train

import elastic_ray as er

SMOKE = "--smoke" in sys.argv[1:]
FILES, FEATURES = 4, 16
ROWS = 1600 if SMOKE else 8000
EPOCHS = 2 if SMOKE else 4
TIME_LIMIT_S = 900.0


def write_files(folder: Path) -> str:
    """Rows with a number, features and a label, in some Parquet files; returns their folder."""
    folder.mkdir()
    dice = np.random.default_rng(0)
    for numbers in np.array_split(np.arange(ROWS), FILES):
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
        er.report({"epoch": epoch, "rows": sums["rows"], "numbers": sums["numbers"], "right": sums["right"]})


def wait_until(condition: Callable[[], bool], handle: er.JobHandle) -> None:
    """Wait for something to come true while the job runs."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while not condition():
        if handle.done() or time.monotonic() > deadline:
            raise RuntimeError(f"too late: {handle.status()}")
        time.sleep(0.1)


def main() -> None:
    """Submit the job, resize it, kill a worker, and print what the epochs have used."""
    with tempfile.TemporaryDirectory(prefix="er-rd-") as folder:
        # Two CPUs for workers, one for Ray Data's tasks: without a free one nothing would be read.
        ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
        dataset = ray.data.read_parquet(write_files(Path(folder) / "data")).map_batches(scale).random_shuffle()
        handle = er.ElasticTrainer(
            train,
            train_loop_config={"epochs": EPOCHS, "step_s": 0.5 if SMOKE else 0.2},
            scaling_config=ray.train.ScalingConfig(num_workers=(1, 2)),
            run_config=ray.train.RunConfig(storage_path=f"{folder}/runs"),
            datasets={"train": dataset},
        ).submit()
        handle.resize(1)
        wait_until(lambda: handle.status().step > 0, handle)
        handle.resize(2)
        wait_until(lambda: handle.status().workers == 2, handle)
        print("grown to 2 workers", flush=True)
        os.kill(handle.workers()[1].pid, signal.SIGKILL)
        wait_until(lambda: any(event.kind is er.EventKind.FAILURE for event in handle.events()), handle)
        print("a worker was killed (kill -9), and the job goes on", flush=True)
        result = handle.result(timeout=TIME_LIMIT_S)
        assert result.metrics_dataframe is not None
        for _, row in result.metrics_dataframe.iterrows():
            once = row["rows"] == ROWS and row["numbers"] == sum(range(ROWS))
            print(
                f"epoch {row['epoch']:.0f}: {row['rows']:.0f} rows, each once: {'yes' if once else 'no'}; "
                f"accuracy {row['right'] / ROWS:.2f}"
            )
        ray.shutdown()


if __name__ == "__main__":
    main()
