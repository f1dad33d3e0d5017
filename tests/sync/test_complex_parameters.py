"""Models with complex parameters, and programs with another default dtype, train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.sync import StrategyError
from tests.loop.changing import Change, Kill, Outcome, run_job

BATCH, STEPS = 4, 20
CLOSE = 2e-5


class Mix(nn.Module):
    """A complex layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 3, generator=generator, dtype=torch.complex64) * 0.4)
        self.bias = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.complex64) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Spectral(nn.Module):
    """One between real ones, as in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.first = nn.Parameter(torch.randn(6, 6, generator=generator) * 0.4)
        self.mix = Mix()
        self.last = nn.Parameter(torch.randn(3, 1, generator=generator) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.fft.rfft(torch.tanh(x @ self.first))).abs() @ self.last


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.03, eps=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.03, eps=1e-2, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-2, centered=True),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.03, eps=1e-2),
}


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(BATCH * STEPS, size, generator=generator) for size in (6, 1)))


def _plain(optimizer: str) -> dict[str, Tensor]:
    model = Spectral()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for x, y in DataLoader(_data(), batch_size=BATCH):
        stepper.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        stepper.step()
    return model.state_dict()


def _trained(optimizer: str, strategy: str | None, micro: int | None, rule: Any) -> Any:
    model = Spectral()
    if strategy == "fully_shard":
        er.fully_shard(model.mix)
        er.fully_shard(model)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    kept = None if strategy == "fully_shard" else strategy
    wrapped = er.AdaptiveDataParallel(model, stepper, scaling_rule=rule, strategy=kept)
    loader = er.AdaptiveDataLoader(_data(), batch_size=BATCH, shuffle=False)
    if micro is not None:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(1):
        for x, y in loader:
            stepper.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            stepper.step()
    noise = wrapped.noise_scale
    return {k: v.clone() for k, v in model.state_dict().items()}, noise and (noise.sqr, noise.var)


def _check(
    optimizer: str,
    strategy: str | None = None,
    *,
    workers: int = 2,
    micro: int | None = None,
    rule: Any = None,
    script: Any = (),
    close: float = CLOSE,
) -> Outcome:
    wanted = _plain(optimizer)
    found = run_job(lambda: _trained(optimizer, strategy, micro, rule), script, first=tuple(range(1, workers + 1)))
    for weights, _ in found.results.values():
        for name, value in wanted.items() if weights else ():  # of a sharded model rank 0 has the whole
            torch.testing.assert_close(weights[name], value, rtol=0, atol=close, msg=lambda m: f"{name}: {m}")  # noqa: B023
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_complex_parameters_train_as_in_plain_pytorch(optimizer: str, workers: int) -> None:
    """With the gradient noise where there are several gradients a step."""
    found = _check(optimizer, workers=workers)
    for _, noise in found.results.values():
        if workers == 1:  # with a fixed batch one worker measures none
            assert noise is None
        else:
            assert noise is not None and all(value > 0 for value in noise)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("strategy", ["fully_shard", "int8", "powersgd", "local_sgd"])
def test_other_strategies_take_complex_parameters(strategy: str) -> None:
    """Those that approximate end near the plain weights."""
    exact = strategy == "fully_shard"
    _check("adam", strategy, workers=3, rule=None if exact else "none", close=CLOSE if exact else 0.5)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "partitioned_ps"])
def test_tiles_refuse_complex_parameters(strategy: str) -> None:
    with pytest.raises(StrategyError, match=r"mix.weight is complex64: use strategy='all_reduce'"):
        _check("adam", strategy)


def test_workers_come_and_die() -> None:
    _check("adam", script=[Change(3, (1, 2, 3)), Kill(8, 2, "allreduce"), Change(12, (3,))])


def test_micro_batches_while_workers_come_and_go() -> None:
    """As many as divide the batch."""
    _check("sgd", micro=1, rule="none", script=[Change(3, (1, 2, 3, 4)), Change(12, (3,))])


@pytest.fixture
def sixteen_bits() -> Iterator[None]:
    """All tensors of floats are of 16 bits unless something else is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("strategy", ["all_reduce", "int8", "zero1", "zero2", "fully_shard"])
@pytest.mark.usefixtures("sixteen_bits")
def test_default_dtype_of_16_bits_leaves_control_numbers_exact(strategy: str) -> None:
    """Else the ranks were told to have read different samples."""

    def train() -> None:
        model = nn.Linear(6, 1)
        assert model.weight.dtype == torch.bfloat16
        if strategy == "fully_shard":
            er.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        kept = None if strategy == "fully_shard" else strategy
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=kept)
        for _ in er.remaining_epochs_until(2):
            for x, y in er.AdaptiveDataLoader(_data(), batch_size=BATCH):
                optimizer.zero_grad()
                nn.functional.mse_loss(wrapped(x.bfloat16()), y.bfloat16()).backward()
                optimizer.step()

    assert run_job(train, [Change(5, (1, 2, 3))], first=(1, 2)).told == []
