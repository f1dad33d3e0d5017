"""Whether gradients are finite, by one sum."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_ray.sync.operations.gradient_checks import is_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_found(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert is_finite(torch.zeros(0, dtype=dtype))
    assert is_finite(torch.full((3,), largest, dtype=dtype)), "the sum is not finite, and its elements are"
    for bad in ([math.inf], [-math.inf], [math.nan], [math.inf, -math.inf], [largest, largest, math.inf]):
        assert not is_finite(torch.tensor([1.0, *bad], dtype=dtype))
