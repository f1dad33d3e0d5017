"""Second moments of the whole batch, on ranks that step with their shares' gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic_ray.sync.averaging.batch_moments import scale_moments, weight


def steps_of(kind: Any, gradients: list[torch.Tensor], shares: float, **options: Any) -> dict[str, Any]:
    """State of one parameter after these gradients."""
    param = nn.Parameter(torch.ones_like(gradients[0]))
    optimizer = kind([param], **options)
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
        scale_moments(optimizer, shares)
    assert bool(param.isfinite().all())
    return dict(optimizer.state[param])


@settings(max_examples=12, deadline=None)
@given(shares=st.sampled_from([1.5, 2, 4, 8]), mean=st.floats(-2, 2), beta1=st.floats(0.8, 0.95))
def test_moments_are_those_of_the_mean_gradient(shares: float, mean: float, beta1: float) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [mean + torch.randn(4000, generator=generator) for _ in range(120)]
    state = steps_of(torch.optim.AdamW, gradients, shares, betas=(beta1, 0.95))
    found = float(state["exp_avg_sq"].mean()) / (1 - 0.95**120)
    wanted = mean**2 + 1 / shares
    # a weight of more than 63/64 is not used, which leaves some of the noise
    capped = (1 - weight(shares, beta1, 120)) + weight(shares, beta1, 120) * (1 - beta1) / (1 + beta1)
    assert found == pytest.approx(mean**2 + max(1 / shares, capped), rel=0.06)
    assert found == pytest.approx(wanted, rel=0.06) or weight(shares, beta1, 120) == 63 / 64


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_moments_stay_positive(kind: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(500, generator=generator).to(dtype) * (-1) ** step for step in range(30)]
    gradients[3:20] = [gradients[2] * -1e-3] * 17
    second = steps_of(kind, gradients, 1000.0)["exp_avg_sq"]
    assert bool((torch.view_as_real(second) if dtype.is_complex else second).ge(0).all())
    plain = steps_of(kind, gradients, 1.0)["exp_avg_sq"]
    assert float(second.abs().sum()) < 0.5 * float(plain.abs().sum())


_OVERFLOW = """
import torch
from tests.sync.test_batch_moments import steps_of

gradients = [torch.tensor([1e21, -1e30, 1.0, 0.0])] + [torch.tensor([1.0, 1e21, 1e19, 0.0])] * 3
for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam):
    found, plain = (steps_of(kind, gradients, shares)["exp_avg_sq"] for shares in (2.0, 1.0))
    assert plain.isinf().tolist() == [True, True, False, False]
    assert found.isinf().equal(plain.isinf()) and not found.isnan().any(), (kind, found)
"""


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_moments_overflow_as_in_one_process(capability: str) -> None:
    """With fused multiply-adds (``avx2``) products do not overflow by themselves, without them they do."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", _OVERFLOW], env=environment, check=True, timeout=100)


class Own(torch.optim.Adam):
    """A user's optimizer, whose state may mean something else."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adam, {"weight_decay": 0.1}), (Own, {}), (torch.optim.RMSprop, {"momentum": 0.9})],
)
def test_other_optimizers_keep_their_moments(kind: Any, options: dict[str, Any]) -> None:
    gradients = [torch.tensor([1.0, -3.0]), torch.tensor([2.0, 5.0])]
    found, plain = (steps_of(kind, gradients, shares, **options) for shares in (4.0, 1.0))
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(plain[key])) for key, value in found.items())


def test_a_parameter_without_state_gets_none() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = torch.optim.Adam([p])
    scale_moments(optimizer, 4.0)  # as after a step that AMP has skipped
    assert not optimizer.state
