"""Streams of others: each sample once, and a word where their order is another one on each worker."""

from __future__ import annotations

import collections
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import elastic_ray as er
from elastic_ray.data.order import item_tag
from tests.loop.changing import Change, Kill, run_job

SAMPLES, BATCH, EPOCHS = 48, 8, 2
PER_EPOCH = SAMPLES // BATCH
GROWS = (Change(2, (1, 2)), Change(PER_EPOCH + 2, (1, 2, 3)))


def run(make: Callable[[], Any], script: Sequence[Any] = GROWS, first: Sequence[int] = (1,)) -> Any:
    """Train on it; returns what each epoch used, and what the user was told."""
    used: dict[int, list[int]] = collections.defaultdict(list)

    def train() -> None:
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        loader = er.AdaptiveDataLoader(make(), batch_size=BATCH)
        for epoch in er.remaining_epochs_until(EPOCHS):
            for batch in loader:
                optimizer.zero_grad()
                wrapped(torch.ones(len(batch["id"]), 2)).square().mean().backward()
                optimizer.step()
                used[epoch].extend(batch["id"].tolist())

    told = run_job(train, script, first=first).told
    return used, [text for kind, text, _ in told if kind == "warning"]


class Stream(IterableDataset[dict[str, Any]]):
    """Rows in an order of its own."""

    def __init__(self, order: Callable[[], random.Random] | None) -> None:
        self.order = order

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = list(range(SAMPLES))
        if self.order is not None:
            self.order().shuffle(rows)
        for row in rows:
            yield {"id": row, "x": torch.full((3,), float(row))}


def each_once(used: dict[int, list[int]]) -> bool:
    return [sorted(rows) for rows in used.values()] == [[*range(SAMPLES)]] * EPOCHS


def test_streams_that_are_alike_are_used_once_each() -> None:
    for order in (None, lambda: random.Random(5)):
        used, told = run(lambda order=order: Stream(order))
        assert each_once(used) and not told
    _, told = run(lambda: Stream(None), [Kill(3, 2, "backward"), Kill(8, 3, "edge")], first=(1, 2, 3))
    assert not told


def test_streams_that_differ_are_told_of_once() -> None:
    used, told = run(lambda: Stream(random.Random), first=(1, 2), script=[])
    assert not each_once(used)
    (text,) = told
    assert "does not give the same samples in the same order on every worker" in text and "detshuffle" in text


def test_items_are_told_apart_by_what_they_hold() -> None:
    items = [
        {"x": torch.tensor([1.0, 2.0])},
        {"x": torch.tensor([1.0, 3.0])},
        {"y": torch.tensor([1.0, 2.0])},
        (np.arange(3), "text"),
        (np.arange(4), "text"),
        (np.arange(3), b"text"),
        [1, 2.0, None, True],
        [1, 2.0, None, False],
        "a" * 300,
        "a" * 301,
        torch.eye(3).to_sparse(),
        object(),
        {},
    ]
    tags = [item_tag(item) for item in items]
    assert len(set(tags)) == len(tags) and all(tag > 0 for tag in tags)
    assert tags == [item_tag(item) for item in items]


def shards(folder: Path) -> str:
    """Tar files as webdataset reads them."""
    for shard in range(4):
        with tarfile.open(folder / f"s-{shard}.tar", "w") as tar:
            for row in range(shard * 12, shard * 12 + 12):
                content = json.dumps({"id": row}).encode()
                info = tarfile.TarInfo(f"{row:04d}.json")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return f"{folder}/s-{{0..3}}.tar"


def test_webdataset(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    urls = shards(tmp_path)

    def opened(*stages: Any) -> Any:
        plain = wds.WebDataset(urls, shardshuffle=False, nodesplitter=None, empty_check=False)
        for stage in stages:
            plain = plain.compose(stage)
        return plain.decode().map(lambda sample: {"id": sample["json"]["id"]})

    for make in (opened, lambda: opened(wds.detshuffle(20, seed=3))):
        used, told = run(make)
        assert each_once(used) and not told
    assert used[0][:4] != used[1][:4], "another order in each epoch"
    _, told = run(lambda: opened(wds.filters.shuffle(20)), first=(1, 2), script=[])
    assert len(told) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_hugging_face_datasets(streams: bool) -> None:
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        rows = datasets.Dataset.from_list([{"id": row, "x": [float(row)]} for row in range(SAMPLES)])
        rows = rows.with_format("torch")
        return rows.to_iterable_dataset(num_shards=4).shuffle(seed=7, buffer_size=10) if streams else rows

    used, told = run(make)
    assert each_once(used) and not told
    assert used[0][:4] != used[1][:4]
    _, told = run(make, [Kill(3, 2, "backward")], first=(1, 2))
    assert not told


def test_torchdata_nodes_and_stateful_datasets() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    class Stateful(Stream):
        """As ``StatefulDataLoader`` takes them: the words change nothing here."""

        def state_dict(self) -> dict[str, int]:
            return {"at": 0}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError("the position is the loader's")

    used, told = run(lambda: Stateful(None))
    assert each_once(used) and not told
