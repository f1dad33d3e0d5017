"""Parts of Ray Data's integration that need no cluster: batches of blocks, seeds of shuffles, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray.data
import ray.train
import torch
from ray.data.collate_fn import ArrowBatchCollateFn, PandasBatchCollateFn

import elastic_ray as er
from elastic_ray.data.batches import StepSplit
from elastic_ray.integrations.ray_data.shard import RayDataBatches, cut, to_batch
from elastic_ray.run.current import set_session
from elastic_ray.worker.train_loop import call, pack
from tests.loop.alone import session_of


def table(**columns: Any) -> Any:
    return pa.table(columns)


def test_batch_is_dict_of_tensors_by_column_across_blocks() -> None:
    pixels = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(16, dtype=np.float32).reshape(4, 2, 2))
    first = table(id=[0, 1, 2, 3], x=[0.0, 1.0, 2.0, 3.0], word=list("abcd"), ok=[True, False] * 2, pixels=pixels)
    batch = to_batch([cut(first, 2, 4), cut(first, 0, 1)], None)
    assert batch["id"].tolist() == [2, 3, 0] and batch["id"].dtype == torch.int64
    assert batch["x"].dtype == torch.float64 and batch["ok"].dtype == torch.bool
    assert batch["word"] == ["c", "d", "a"]
    assert batch["pixels"].shape == (3, 2, 2) and batch["pixels"][2].tolist() == [[0, 1], [2, 3]]
    batch["x"] += 1  # it is the user's own
    assert first["x"].to_pylist() == [0.0, 1.0, 2.0, 3.0]


def test_lists_of_one_length_are_stacked_others_are_not() -> None:
    batch = to_batch([table(same=[[1, 2], [3, 4]], other=[[1], [2, 3]], gap=[1.0, None])], None)
    assert batch["same"].tolist() == [[1, 2], [3, 4]]
    assert [each.tolist() for each in batch["other"]] == [[1], [2, 3]]
    assert torch.isnan(batch["gap"][1])


def test_a_block_of_pandas_is_cut_like_any() -> None:
    batch = to_batch([cut(pd.DataFrame({"id": [5, 6, 7]}), 1, 3)], None)
    assert batch["id"].tolist() == [6, 7]


class OfArrow(ArrowBatchCollateFn):
    def __call__(self, batch: Any) -> Any:
        return batch.num_rows, type(batch).__name__


class OfPandas(PandasBatchCollateFn):
    def __call__(self, batch: Any) -> Any:
        return len(batch), type(batch).__name__


def test_collate_functions_get_what_ray_data_gives_them() -> None:
    one = table(id=[1, 2])
    assert to_batch([one], OfArrow()) == (2, "Table")
    assert to_batch([one], OfPandas()) == (2, "DataFrame")
    assert to_batch([one], lambda columns: columns["id"].sum()) == 3


@pytest.mark.parametrize(
    ("datasets", "words"),
    [
        (
            {"train": torch.utils.data.TensorDataset(torch.arange(3))},
            r"datasets\['train'\] must be a ray.data.Dataset, ",
        ),
        ({1: None}, "datasets must be a dict from names to ray.data.Dataset, but got {1: None}"),
        ([], r"datasets must be a dict from names .* got \[\]"),
    ],
)
def test_what_is_no_ray_dataset_is_refused_at_once(datasets: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        er.ElasticTrainer(print, datasets=datasets)


@pytest.mark.parametrize("ask", [er.get_dataset_shard, ray.train.get_dataset_shard])
def test_without_a_trainer_the_way_out_is_told(ask: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"without a trainer, and under torchrun.*elastic_ray.data.arrow.ArrowDataset"
    ):
        call(pack(lambda: ask("train"), None))


class Known(RayDataBatches):
    """Source whose rows are known at once, up to the position that it asks for."""

    def _know(self, end: int, *, ahead: int) -> None:
        self._end = end


def test_a_step_that_is_drawn_again_has_its_rows() -> None:
    """Also if batches are smaller by now: rows that are not known would be left out of it."""
    session_of()
    split = StepSplit(batch_size=8, micro_steps=1, world_size=1, rank=0, drop_last=False, owed=64, most=8)
    split.start(0, 0)
    source = Known("train", None, known_rows=None, collate=None, run="")
    step = source.step(0, 0, split)
    set_session(None)
    assert step.sizes == [[8] * 8] and source._end >= 64
