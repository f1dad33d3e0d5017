"""The order of a shuffled epoch: a permutation whatever its length, as good as a drawn one, and the same for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from elastic_ray.data.arguments import LoaderArguments
from elastic_ray.data.arrow import ArrowDataset
from elastic_ray.data.batches import MapBatches, StepSplit
from elastic_ray.data.order import IndexOrder
from elastic_ray.data.sharding import Indices, Permutation

UNLIKELY = 1e-4  # of a p value; the keys are fixed, so a test that passes always passes


def epochs(samples: int, count: int) -> Indices:
    """Return the orders of some epochs: [epoch, position]."""
    order = IndexOrder(samples=samples)
    return np.array([order.epoch_order(0, epoch)[:] for epoch in range(count)])


@pytest.mark.parametrize(
    ("samples", "first", "expected"),
    [
        (10, 0, [7, 1, 8, 5, 6, 3, 4, 0, 2, 9]),
        (1_000, 500, [405, 144, 149, 171, 390, 514, 684, 132, 52, 878]),
        (1_281_167, 0, [275598, 610945, 369257, 945378, 916277, 1202590, 376172, 850921, 36712, 496204]),
        (10**9, 999_999_995, [352747524, 625701224, 122518868, 140381135, 965706426]),
        (2**62, 2**62 - 2, [1500528757276024867, 3891529439719691309]),
    ],
)
def test_orders_are_those_of_every_other_version(samples: int, first: int, expected: list[int]) -> None:
    """Recorded once. A job that continues with a new version, or on other machines, takes the samples that are left."""
    assert IndexOrder(samples=samples).epoch_order(7, 3)[first : first + 10].tolist() == expected


@settings(max_examples=200)
@given(samples=st.integers(1, 5_000), key=st.text(max_size=9), data=st.data())
def test_each_index_once_any_part_is_that_of_whole(samples: int, key: str, data: st.DataObject) -> None:
    order = Permutation(samples=samples, key=key)
    whole = order[:]
    assert len(order) == samples and whole.dtype == np.int64
    assert np.array_equal(np.sort(whole), np.arange(samples))
    first, last = (data.draw(st.integers(0, samples)) for _ in range(2))
    assert np.array_equal(order[first:last], whole[first:last])
    some = np.array(data.draw(st.lists(st.integers(0, samples - 1), max_size=9)), dtype=np.int64)
    assert np.array_equal(order[some], whole[some])


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 17, 1_000])
def test_without_a_key_indices_ascend(samples: int) -> None:
    assert Permutation(samples=samples)[:].tolist() == list(range(samples))


# A permutation's indicators have n / (n - 1) times the variance of independent ones.
@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("samples", [33, 2, 3, 5, 9, 16, 100, 300, 1_024, 3_000])
def test_every_index_comes_at_every_position_equally_often(samples: int) -> None:
    orders = epochs(samples, 300 if samples > 100 else 1_500)
    cells = min(samples, 16)  # stretches of neighbouring indices, and of positions
    stretches = np.arange(samples) * cells // samples
    found = np.zeros((cells, cells))
    np.add.at(found, (np.broadcast_to(stretches, orders.shape), stretches[orders]), 1)
    sizes = np.bincount(stretches)
    expected = len(orders) * np.outer(sizes, sizes) / samples
    statistic = ((found - expected) ** 2 / expected).sum() * (samples - 1) / samples
    assert stats.chi2.sf(statistic, (cells - 1) ** 2) > UNLIKELY


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("samples", [33, 5, 9, 16, 100, 1_024])
def test_neighbours_of_an_order_are_no_neighbours_in_data(samples: int) -> None:
    orders = epochs(samples, 1_000)
    gaps = np.bincount((np.diff(orders, axis=1) % samples).ravel(), minlength=samples)[1:]
    expected = gaps.sum() / (samples - 1)
    assert stats.chi2.sf(((gaps - expected) ** 2 / expected).sum(), samples - 2) > UNLIKELY


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("samples", [1_024, 10, 100, 3_000])
def test_epochs_and_seeds_have_nothing_in_common(samples: int) -> None:
    orders = epochs(samples, 1_000)
    others = np.array([IndexOrder(samples=samples).epoch_order(seed, 0)[:] for seed in range(1, 1_000)])
    for one, other in ((orders[:-1], orders[1:]), (orders[1:], others)):
        # At how many positions two orders have the same index: 1 on average, with a variance of 1.
        alike = (one == other).sum(axis=1)
        assert abs(alike.mean() - 1) < 4 / np.sqrt(len(alike))
        ranks = ((one - one.mean()) * (other - other.mean())).mean(axis=1) / np.arange(samples).var()
        assert stats.kstest(ranks * np.sqrt(samples - 1), "norm").pvalue > UNLIKELY


def test_a_window_of_a_large_order_is_spread_everywhere() -> None:
    samples = 10**9
    window = Permutation(samples=samples, key="a")[10**8 : 10**8 + 100_000]
    assert len(np.unique(window)) == len(window)
    for values in (window * 64 // samples, window % 64, (np.diff(window) % samples) * 64 // samples):
        assert stats.chisquare(np.bincount(values, minlength=64)).pvalue > UNLIKELY


def parquet_order(folder: Path, rows: int) -> Indices:
    pa.parquet.write_table(pa.table({"number": range(rows)}), folder / "a.parquet", row_group_size=7)
    return ArrowDataset(folder).epoch_order(7, 3)[:]


def test_parquet_orders_are_those_of_every_other_version(tmp_path: Path) -> None:
    expected = [
        8,
        15,
        22,
        13,
        16,
        9,
        10,
        12,
        25,
        11,
        24,
        7,
        18,
        20,
        17,
        23,
        21,
        19,
        26,
        27,
        14,
        29,
        0,
        2,
        1,
        4,
        28,
        3,
        6,
        5,
    ]
    assert parquet_order(tmp_path, 30).tolist() == expected


class Echo:
    """A dataset whose samples are their indices."""

    def __init__(self, order: Indices, *, locality: bool) -> None:
        self.order, self.locality = order, locality

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> int:
        return index

    def epoch_order(self, seed: int, epoch: int) -> Indices:
        return self.order


@settings(max_examples=60)
@given(
    total=st.integers(1, 3_000),
    world_size=st.integers(1, 4),
    batch_size=st.sampled_from([1, 4, 30, 500, 5_000]),
    micro_steps=st.integers(1, 3),
    locality=st.booleans(),
)
def test_what_is_computed_ahead_is_what_each_step_takes(
    total: int, world_size: int, batch_size: int, micro_steps: int, locality: bool
) -> None:
    order = Permutation(samples=total, key="a")[:]
    dataset = Echo(order, locality=locality)
    taken: list[list[int]] = []
    arrange: Callable[[Indices], Indices] = np.sort if locality else np.asarray
    expected: list[list[int]] = []
    for rank in range(world_size):
        given = LoaderArguments(dataset=dataset, options={"collate_fn": list})
        source = MapBatches(given, lambda: dataset, seed=0)
        cut = StepSplit(
            batch_size=batch_size, micro_steps=micro_steps, world_size=world_size, rank=rank, drop_last=False
        )
        position = 0
        source.start(0, position, cut, new_pass=True)
        while (step := source.step(0, position, cut)).sizes:
            count = sum(map(sum, step.sizes))
            taken += [fetch() for fetch in step.fetches]
            whole = arrange(order[position : position + count])
            expected += [whole[piece].tolist() for piece in cut.slices(count, position)]
            position += count
    assert taken == expected and sorted(index for batch in taken for index in batch) == list(range(total))


def test_one_position_and_no_samples() -> None:
    order = Permutation(samples=17, key="a")
    assert [order[each] for each in (0, 2, -1)] == order[:][[0, 2, -1]].tolist()
    with pytest.raises(IndexError):
        order[17]
    assert Permutation(samples=0, key="a")[:].tolist() == []
