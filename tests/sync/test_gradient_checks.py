"""Whether gradients are finite, by one sum."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_ray.sync.operations.gradient_checks import Finiteness, is_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_found(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert is_finite(torch.zeros(0, dtype=dtype))
    assert is_finite(torch.full((3,), largest, dtype=dtype)), "the sum is not finite, and its elements are"
    for bad in ([math.inf], [-math.inf], [math.nan], [math.inf, -math.inf], [largest, largest, math.inf]):
        assert not is_finite(torch.tensor([1.0, *bad], dtype=dtype))


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_asked_for_later_is_what_was_there(waits: bool) -> None:
    largest = torch.finfo(torch.float32).max
    found = Finiteness(lambda tensor: waits)
    assert found.found(), "of nothing"
    changes = torch.full((3,), largest)
    found.add(changes)
    found.add(torch.zeros(0))
    changes.fill_(math.nan)
    assert found.found()
    found.add(torch.tensor([1.0, math.inf], dtype=torch.bfloat16))
    found.add(torch.ones(2))
    assert not found.found() and not found.found()
