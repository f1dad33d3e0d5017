"""The workers of a unit that read parts of their samples: each sample once, in equal parts."""

from __future__ import annotations

import pytest

from elastic_ray.data.batches import StepSplit


def split(rank: int, world_size: int, shard: int, batch_size: int, *, drop_last: bool = False) -> StepSplit:
    return StepSplit(
        batch_size=batch_size,
        micro_steps=1,
        world_size=world_size,
        rank=rank,
        drop_last=drop_last,
        shard=shard,
        shards=2,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [48, 50, 22])
def test_each_sample_is_read_once_in_equal_parts(world_size: int, total: int) -> None:
    seen: list[int] = []
    position = 0
    while count := split(0, world_size, 0, 12).count(position, total):
        sizes = split(0, world_size, 0, 12).sizes(count, position)
        assert count < 12 + 2 * world_size, "only the last step may be larger, by what would be less than its ranks"
        assert sum(map(sum, sizes)) == count and all(size % 2 == 0 for row in sizes for size in row)
        for rank in range(world_size):
            (part,) = split(rank, world_size, 0, 12).slices(count, position)
            whole = list(range(position + part.start, position + part.stop))
            halves = [split(rank, world_size, shard, 12).own(whole) for shard in (0, 1)]
            assert len(halves[0]) == len(halves[1]) == sizes[rank][0] // 2
            seen += [*halves[0], *halves[1]]
        position += count
    assert sorted(seen) == list(range(total))
