"""Operations of models, and peaks of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_ray.parallel.flops import PEAK_FLOPS, ForwardFlops, peak_of


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_go_by_the_devices_name(name: str, known: str | None) -> None:
    assert peak_of(name) == (None if known is None else PEAK_FLOPS[known])


def test_each_shape_is_counted_once() -> None:
    calls = 0

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4, bias=False)

        def forward(self, x: Any) -> Any:
            nonlocal calls
            calls += torch.utils._python_dispatch._get_current_dispatch_mode() is not None
            return self.layer(x)

    flops, net = ForwardFlops(), Counted()
    for rows in (3, 3, 5, 3, 5):
        assert flops.call(net, (torch.ones(rows, 8),), {}).shape == (rows, 4)
        assert flops.per_sample == 2 * 8 * 4
    assert calls == 2
