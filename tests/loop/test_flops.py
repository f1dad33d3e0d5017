"""Operations of models, and peaks of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from elastic_ray.parallel import model_copy
from elastic_ray.parallel.model_copy import PEAK_FLOPS, peak_of


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


def test_each_shape_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = []
    original = FlopCounterMode

    def counted(*args: Any, **kwargs: Any) -> Any:
        counters.append(original(*args, **kwargs))
        return counters[-1]

    monkeypatch.setattr("elastic_ray.parallel.model_copy.FlopCounterMode", counted)
    counter, net = model_copy.ForwardFlops(), nn.Linear(8, 4, bias=False)
    for rows in (3, 3, 5, 3, 5):
        assert counter.call(net, (torch.ones(rows, 8),), {}).shape == (rows, 4)
        assert counter.per_sample == 2 * 8 * 4
    assert len(counters) == 2
