"""Operations of models, and peaks of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.parallel.flops import PEAK_FLOPS, TrainingFlops, peak_of
from elastic_ray.state.progress import PassProgress
from elastic_ray.steps.step import LoaderStep

NARROW, WIDE = 2 * 8 * 16, 2 * 16 * 4  # operations of a sample in the two layers, forward


def net() -> nn.Sequential:
    """Of two layers; the first has no gradient of its input to compute."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def step(*micros: int) -> LoaderStep:
    """Of one rank with these micro-batches."""
    shape = BatchChoice(atomic_bsz=max(micros), accum_steps=len(micros) - 1)
    return LoaderStep(
        loader_pass=PassProgress(),
        total=1000,
        sizes=[list(micros)],
        scale=1.0,
        init_batch_size=8,
        shape=shape,
        ordinal=1,
        can_switch=lambda _: True,
    )


def trained(counter: TrainingFlops, model: nn.Module, *steps: Sequence[int], width: Sequence[int] = (8,)) -> None:
    """Call the model in steps of these micro-batches, and start one more, which is not taken yet."""
    for micros in (*steps, [1]):
        of = step(*micros)
        for number, samples in enumerate(micros):
            of.start_micro(number)
            counter.call(model, (torch.ones(samples, *width),), {}, of, 0)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-16GB", "V100 PCIE"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("GRID A100-10C", None),
    ],
)
def test_peaks_go_by_the_devices_name(name: str, known: str | None) -> None:
    assert peak_of(name) == (None if known is None else PEAK_FLOPS[known])


def test_each_shape_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, formula = [], flop_counter.flop_registry[torch.ops.aten.mm]

    def noted(*args: Any, **kwargs: Any) -> int:
        seen.append(len(args[0]))
        return int(formula(*args, **kwargs))

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.mm, noted)
    counter = TrainingFlops(peak=2.0)
    trained(counter, nn.Linear(8, 4, bias=False), [3], [3], [5], [3], [5])
    assert seen == [3, 5, 1] and counter.take_peak_s() == 2 * 8 * 4 * 2 / 2.0


def test_accumulation_and_passes_of_one_batch_add_up() -> None:
    counter, model = TrainingFlops(1.0), net()
    trained(counter, model, [3, 2], [4, 1])
    once = 2 * NARROW + 3 * WIDE
    assert counter.take_peak_s() == once
    assert counter.take_peak_s() == once, "nothing new"
    of = step(4)
    for _ in range(2):
        counter.call(model, (torch.ones(4, 8),), {}, of, 0)
    with torch.no_grad():
        counter.call(model, (torch.ones(4, 8),), {}, of, 0)
    trained(counter, model)
    assert counter.take_peak_s() == (once + 2 * once * 4) / 5, "the one more of before, and two passes of four samples"


def test_frozen_layers_have_no_backward_pass() -> None:
    counter, model = TrainingFlops(1.0), net()
    model[0].requires_grad_(False)
    trained(counter, model, [4])
    assert counter.take_peak_s() == NARROW + 2 * WIDE
    checkpointed = TrainingFlops(1.0)
    whole: Any = lambda x: checkpoint(net(), x.requires_grad_(), use_reentrant=True)  # noqa: E731
    trained(checkpointed, whole, [4])
    assert checkpointed.take_peak_s() == 3 * (NARROW + WIDE)


def test_shapes_beyond_the_fourth_count_by_size() -> None:
    counter, model = TrainingFlops(1.0), nn.Linear(8, 4)
    for length in (1, 2, 3, 4):
        trained(counter, model, [1], width=(length, 8))
    counter.take_peak_s()
    trained(counter, model, [2], width=(100, 8))
    assert counter.take_peak_s() == pytest.approx((4 + 100 * 2) * 2 * 8 * 4 * 2 / 3), "the one more of before, too"


def test_a_formula_that_fails_makes_operations_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.addmm, fails)
    counter = TrainingFlops(1.0)
    trained(counter, net(), [4])
    assert counter.take_peak_s() is None


@pytest.mark.parametrize("fullgraph", [False, True])
def test_counting_leaves_compilation_alone(fullgraph: bool) -> None:
    torch._dynamo.reset()
    compiled, counter = CompileCounter(), TrainingFlops(1.0)
    trained(counter, torch.compile(net(), backend=compiled, fullgraph=fullgraph), [4], [4])
    assert compiled.frame_count >= 1 and counter.take_peak_s() is not None
    torch._dynamo.reset()
