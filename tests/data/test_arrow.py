"""Parquet through pyarrow: exact, shuffled, and never more in memory than asked for."""

from __future__ import annotations

import http.server
import pickle
import random
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from elastic_ray.data.arrow import ArrowDataset
from elastic_ray.data.order import order_for
from elastic_ray.data.sharding import can_switch, step_size
from tests.data.pieces import rank_indices

ROWS, GROUP = 500, 20


class Counting(ArrowDataset):
    """Counts what is read from the files."""

    def read_row_group(self, group: int) -> pa.Table:
        self.__dict__.setdefault("reads", Counter())[group] += 1
        return super().read_row_group(group)


def write(path: Path, first: int, rows: int, *, group: int = GROUP) -> Path:
    number = np.arange(first, first + rows)
    image = np.stack([number, number * 2, number * 3], axis=1).astype(np.float32)
    table = pa.table(
        {
            "number": number,
            "half": (number / 2).astype(np.float32),
            "image": pa.FixedSizeListArray.from_arrays(pa.array(image.ravel()), 3),
            "tokens": pa.array([list(range(n % 4)) for n in number], pa.list_(pa.int32())),
            "name": [f"row {n}" for n in number],
            "maybe": [int(n) if n % 2 else None for n in number],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parquet")
    for number in range(5):
        write(root / f"part-{number}.parquet", number * 100, 100)
    (root / "_SUCCESS").touch()
    (root / "README.md").write_text("not Parquet")
    return root


def numbers(dataset: ArrowDataset) -> list[int]:
    return [int(row["number"]) for row in dataset.__getitems__(list(range(len(dataset))))]


def test_rows_are_what_was_written(folder: Path) -> None:
    dataset = ArrowDataset(folder)
    assert (len(dataset), dataset.row_groups) == (ROWS, 25)
    row = dataset[123]
    assert row["number"] == 123
    assert row["half"] == np.float32(61.5)
    assert row["half"].dtype == np.float32
    np.testing.assert_array_equal(row["image"], np.array([123, 246, 369], np.float32))
    assert row["image"].dtype == np.float32
    row["image"] += 1  # its memory is the user's
    np.testing.assert_array_equal(row["tokens"], np.array([0, 1, 2], np.int32))
    assert (row["name"], row["maybe"], dataset[122]["maybe"]) == ("row 123", 123, None)
    assert dataset[-1]["number"] == 499
    assert [row["number"] for row in dataset.__getitems__([400, 3, 3, 401])] == [400, 3, 3, 401]
    assert dataset.__getitems__([]) == []
    for tokens, index in ((0, 4), (1, 5), (3, 499)):
        assert len(dataset[index]["tokens"]) == tokens


def test_every_kind_of_source(folder: Path, tmp_path: Path) -> None:
    parts = sorted(folder.glob("*.parquet"))
    everything = list(range(ROWS))
    assert numbers(ArrowDataset(str(folder))) == everything
    assert numbers(ArrowDataset(parts)) == everything
    assert numbers(ArrowDataset(parts[::-1]))[:2] == [400, 401]
    assert numbers(ArrowDataset(parts[1])) == everything[100:200]
    assert numbers(ArrowDataset(folder.as_uri())) == everything
    assert numbers(ArrowDataset([part.as_uri() for part in parts])) == everything
    below = pa.fs.SubTreeFileSystem(str(folder), pa.fs.LocalFileSystem())
    again = pickle.loads(pickle.dumps(ArrowDataset("", filesystem=below)))
    assert numbers(again) == everything
    write(tmp_path / "year=2024" / "a.parquet", 0, 5)
    write(tmp_path / "year=2025" / "b.parquet", 5, 5)
    assert [row["year"] for row in ArrowDataset(tmp_path, columns=["year"]).__getitems__([0, 9])] == [
        2024,
        2025,
    ]


def test_columns_and_transform(folder: Path) -> None:
    dataset = ArrowDataset(folder, columns=["number", "image"], transform=lambda row: row["image"] + row["number"])
    np.testing.assert_array_equal(dataset[2], [4, 6, 8])
    assert dataset.columns == ("number", "image")


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loader_collates_rows(folder: Path, workers: int) -> None:
    dataset = ArrowDataset(folder, columns=["number", "half", "image", "name"])
    assert dataset[0]["number"] == 0  # opened here, before the fork
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=50, num_workers=workers)
    batches = list(loader)
    assert torch.cat([batch["number"] for batch in batches]).tolist() == list(range(ROWS))
    assert batches[0]["image"].shape == (50, 3)
    assert batches[0]["half"].dtype == torch.float32
    assert batches[-1]["name"][-1] == "row 499"


def test_the_order_is_a_shuffle_by_windows(folder: Path) -> None:
    dataset = ArrowDataset(folder, buffer_row_groups=4)
    assert order_for(dataset) is dataset
    order = dataset.epoch_order(0, 0)[:]
    assert sorted(order) == list(range(ROWS))
    np.testing.assert_array_equal(order, pickle.loads(pickle.dumps(dataset)).epoch_order(0, 0)[:])
    for other in (dataset.epoch_order(0, 1)[:], dataset.epoch_order(1, 0)[:]):
        assert (order == other).mean() < 0.1
    assert (np.diff(order) == 1).mean() < 0.1
    assert abs(np.corrcoef(order, np.arange(ROWS))[0, 1]) < 0.6
    edges = np.cumsum([4, 4, 4, 4, 3, 3]) * GROUP
    for window in np.split(order // GROUP, edges):
        assert len(set(window)) == len(window) // GROUP
        assert (np.diff(window) != 0).mean() > 0.5, "rows of several groups take turns"


def test_each_row_exactly_once_while_the_group_changes(folder: Path) -> None:
    dice = random.Random(5)
    dataset = ArrowDataset(folder, columns=["number"])
    order = dataset.epoch_order(3, 1)
    position, world, used = 0, 1, []
    while position < ROWS:
        if can_switch(position=position, total=ROWS, world_size=(wanted := dice.randint(1, 6))):
            world = wanted
        count = step_size(position=position, total=ROWS, batch_size=world + dice.randint(0, 40), world_size=world)
        step = np.sort(order[position : position + count])
        shares = [rank_indices(step, rank=rank, world_size=world, micro_steps=2) for rank in range(world)]
        got = [
            int(row["number"]) for share in shares for micro in share for row in dataset.__getitems__(micro.tolist())
        ]
        if dice.random() < 0.2:
            continue  # the step failed and is drawn again
        used += got
        position += count
    assert sorted(used) == list(range(ROWS))


def test_memory_holds_few_row_groups_and_reads_each_once(folder: Path) -> None:
    dataset = Counting(folder, buffer_row_groups=3)
    order = dataset.epoch_order(0, 0)[:]
    for first in range(0, ROWS, 16):
        dataset.__getitems__(order[first : first + 16].tolist())
        assert len(dataset._tables) <= 6
    assert dataset.reads == Counter(range(25))  # type: ignore[attr-defined]
    assert "reads" not in Counting(folder).__dict__, "nothing but footers is read at construction"


def test_ranks_share_the_row_groups_out(folder: Path) -> None:
    ranks = [Counting(folder, buffer_row_groups=4) for _ in range(4)]
    order = ranks[0].epoch_order(0, 0)[:]
    for first in range(0, ROWS, 40):
        step = np.sort(order[first : first + 40])
        for rank, dataset in enumerate(ranks):
            (mine,) = rank_indices(step, rank=rank, world_size=4)
            dataset.__getitems__(mine.tolist())
    reads = sum(len(dataset.reads) for dataset in ranks)  # type: ignore[attr-defined]
    assert reads < 0.75 * 4 * 25, "unsorted, each rank would read each of the 25 row groups"


def test_a_remote_uri_through_fsspec(folder: Path) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")

    class Ranges(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            data = Path(self.translate_path(self.path)).read_bytes()
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            piece = data[int(first) : int(last or len(data)) + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(piece)))
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}")
            self.end_headers()
            self.wfile.write(piece)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        dataset = ArrowDataset(f"http://127.0.0.1:{server.server_port}/part-1.parquet")
        assert numbers(dataset) == list(range(100, 200))
        assert numbers(pickle.loads(pickle.dumps(dataset)))[0] == 100
    finally:
        server.shutdown()
        server.server_close()


def test_nulls_and_unusual_types(tmp_path: Path) -> None:
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(3, 2, 2))
    table = pa.table(
        {
            "flag": [True, None, False],
            "pair": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)),
            "tensor": tensor,
            "words": [["a"], [], ["b", "c"]],
            "point": [{"x": 1}, {"x": 2}, None],
        }
    )
    pq.write_table(table, tmp_path / "odd.parquet")
    first, second, third = ArrowDataset(tmp_path / "odd.parquet").__getitems__([0, 1, 2])
    assert (first["flag"], second["flag"], third["flag"]) == (True, None, False)
    assert first["pair"].tolist() == [1, 2]
    assert second["pair"] is None
    assert third["pair"].tolist() == [3, 4]
    assert third["tensor"].tolist() == [[8, 9], [10, 11]]
    assert (third["words"], second["point"], third["point"]) == (["b", "c"], {"x": 2}, None)


def test_what_cannot_work_says_why(folder: Path, tmp_path: Path) -> None:
    def fails(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error, match=message):
            ArrowDataset(*args, **kwargs)

    fails(FileNotFoundError, "nothing at .*absent", tmp_path / "absent")
    fails(FileNotFoundError, "none of 0 below", tmp_path)
    fails(FileNotFoundError, "empty list", [])
    fails(ValueError, r"some of \['number', 'half'.*got \['label'\]", folder, columns=["label"])
    fails(ValueError, "columns must be some of", folder, columns=[])
    fails(ValueError, "scheme of 'floppy://a/b' must be one", "floppy://a/b")
    fails(TypeError, "pyarrow's or fsspec's, but got int", folder, filesystem=3)
    fails(ValueError, "buffer_row_groups must be at least 1, but got 0", folder, buffer_row_groups=0)
    fails(ValueError, "must have at least 1 row", write(tmp_path / "none.parquet", 0, 0))
    fails(ValueError, "must be Parquet", folder / "README.md")
    with pytest.raises(IndexError, match=r"in 0\.\.499, but got 500\.\.500"):
        ArrowDataset(folder)[500]
