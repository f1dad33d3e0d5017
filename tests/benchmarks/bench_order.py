"""What a joiner computes of the epoch's order before its first batch, and what a step's indices cost.

A map-style dataset whose samples are their indices, one of eight ranks in the middle of an epoch. Beside it NumPy's
permutation of all indices of 30 M samples, which every rank computed before. Bars: a join at 1e9 samples, from no order
to the first batch and to what the ranks compare, within 5 ms; indices of a step of 64 samples a rank within 20 us.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from common import bar, finish, median, side_parser

from elastic_ray.data.arguments import LoaderArguments
from elastic_ray.data.batches import MapBatches, StepSplit
from elastic_ray.data.order import IndexOrder
from elastic_ray.data.sharding import Indices, Order

RANKS, LOCAL_BATCH, STEPS = 8, 64, 1000


def main() -> None:
    """Every size in turn; medians over the repetitions."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of each size")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    rows = [measure(samples, repeats) for samples in (30_000_000, 1_000_000_000)]
    samples = 3_000_000 if options.quick else 30_000_000
    drawn = [seconds(lambda: np.random.default_rng(0).permutation(samples)) for _ in range(min(repeats, 3))]
    rows.append({"samples": samples, "of": "NumPy's permutation", "join [ms]": 1e3 * (median(drawn) or 0.0)})
    bars = [
        bar("join at 1e9 samples [ms]", value=rows[1]["join [ms]"], limit=5, at_least=False),
        bar("indices of a step [us]", value=rows[1]["step [us]"], limit=20, at_least=False),
    ]
    finish("order", rows=rows, bars=bars)


def measure(samples: int, repeats: int) -> dict[str, Any]:
    """Times of joins in the middle of different epochs, and of the steps that follow one."""
    joins = []
    for epoch in range(repeats):
        source = make_source(samples)
        joins.append(seconds(lambda source=source, epoch=epoch: join(source, epoch)))
    tracemalloc.start()
    join(make_source(samples), 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    timed = Timed(source.indices(0))
    source.indices = lambda epoch: timed
    join(source, 0)
    for _ in range(STEPS):
        source.fetch()
    return {
        "samples": samples,
        "of": "an epoch's order",
        "join [ms]": 1e3 * (median(joins) or 0.0),
        "longest [ms]": 1e3 * max(joins),
        "memory [kB]": peak / 1e3,
        "step [us]": 1e6 * timed.seconds / STEPS,
    }


class Echo:
    """A dataset whose samples are their indices."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Timed:
    """An order that knows how long its parts took."""

    def __init__(self, order: Order) -> None:
        self.order, self.seconds = order, 0.0

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, part: slice | Indices) -> Indices:
        begin_s = time.perf_counter()
        indices = self.order[part]
        self.seconds += time.perf_counter() - begin_s
        return indices


def make_source(samples: int) -> MapBatches:
    """Batches of one rank."""
    order = IndexOrder(samples=samples)
    given = LoaderArguments(dataset=Echo(samples), options={"collate_fn": list})
    return MapBatches(given, lambda: order, seed=0)


def join(source: MapBatches, epoch: int) -> Any:
    """Come to the first batch, as a worker does that joins in the middle of an epoch."""
    cut = StepSplit(batch_size=RANKS * LOCAL_BATCH, micro_steps=1, world_size=RANKS, rank=3, drop_last=False)
    position = len(source.indices(epoch)) // 2
    source.start(epoch, position, cut, new_pass=True)
    source.step(epoch, position, cut)
    source.facts(epoch)
    return source.fetch()


def seconds(do: Callable[[], Any]) -> float:
    """Time that a call takes."""
    begin_s = time.perf_counter()
    do()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
