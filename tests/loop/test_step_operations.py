"""A step dispatches few of torch's operations beside the loop's own: each is work for a GPU, and time on a CPU."""

from __future__ import annotations

import pytest

from elastic_ray.sync import AllReduce
from tests.loop.counted import ours, plain

pytestmark = pytest.mark.thorough

FIXED, OF_A_BUCKET = 10, 7  # DDP's: 2, and 1 for each bucket and 3 for each parameter


@pytest.mark.parametrize("world_size", [1, 2])
def test_step_adds_few_operations_and_none_for_each_parameter(world_size: int) -> None:
    few, many = (ours(world_size, layers).of_a_step - plain(layers).of_a_step for layers in (2, 12))
    assert few == many <= FIXED


def test_each_further_bucket_adds_at_most_one_ddp_operation() -> None:
    """Three layers, six parameters, are 864 bytes."""
    whole, cut = (ours(2, 12, strategy=AllReduce(bucket_bytes=size)).of_a_step for size in (25 << 20, 1024))
    assert 0 < cut - whole <= 3 * OF_A_BUCKET
