"""Optimizers around others, replaced layers, lazy ones: what trains, and what is refused with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.run.run import watch_optimizers
from tests.loop.changing import Change, run_job


@pytest.fixture(autouse=True)
def watched() -> None:
    """Steps of all optimizers are looked at, as in a worker."""
    watch_optimizers()


class Sam(torch.optim.Optimizer):
    """As davda54/sam: steps are made by an inner optimizer, on the same groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Lookahead(torch.optim.Optimizer):
    """As timm's: without ``Optimizer.__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = (
            inner,
            inner.param_groups,
            inner.state,
            inner.defaults,
        )

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def _data() -> TensorDataset:
    return TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def _train(optimizer_of: Any, *, steps_inner: bool) -> tuple[Tensor, Tensor]:
    model = _model()
    optimizer = optimizer_of(model.parameters())
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(_data(), batch_size=12, shuffle=False):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            (optimizer.inner if steps_inner else optimizer).step()
    state: Any = optimizer.inner.state[model.weight]
    return model.weight.detach().clone(), next(v for v in state.values() if v.dim())


@pytest.mark.parametrize("steps_inner", [True, False])
@pytest.mark.parametrize("optimizer_of", [Sam, lambda params: Lookahead(torch.optim.Adam(list(params), lr=0.1))])
def test_inner_optimizers_state_reaches_joiner_and_nobody_is_warned(optimizer_of: Any, steps_inner: bool) -> None:
    if steps_inner and optimizer_of is not Sam:
        pytest.skip("only SAM's loops step the inner one")
    model = _model()
    optimizer = optimizer_of(model.parameters())
    for (x,) in torch.utils.data.DataLoader(_data(), batch_size=12):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    found = run_job(lambda: _train(optimizer_of, steps_inner=steps_inner), [Change(3, (1, 2, 3))], first=(1, 2))
    assert not [text for kind, text, _ in found.told if kind == "warning"]
    moment = next(v for v in optimizer.inner.state[model.weight].values() if v.dim())
    for weight, own in found.results.values():
        torch.testing.assert_close(weight, model.weight.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(own, moment, rtol=0, atol=1e-5)


class Turns(torch.optim.Optimizer):
    """One of two optimizers steps, the other after three steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.first = torch.optim.Adam(self.param_groups, lr=0.1)
        self.second = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.second.param_groups = self.first.param_groups

    def step(self, closure: Any = None) -> None:
        steps = self.first.state[self.param_groups[0]["params"][0]].get("step", 0)
        (self.first if steps < 3 else self.second).step()


def _in_turns(wrap: Any = lambda optimizer: optimizer, kind: Any = Turns) -> Tensor:
    """Two optimizers of one model, of which the wrapper gets one."""
    model = _model()
    optimizer: Any = kind(model.parameters())
    wrapped = er.AdaptiveDataParallel(model, wrap(optimizer), scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(_data(), batch_size=12, shuffle=False):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    return model.weight.detach().clone()


def test_optimizers_that_take_turns_are_one_optimizer() -> None:
    model = _model()
    optimizer = Turns(model.parameters())
    for (x,) in torch.utils.data.DataLoader(_data(), batch_size=12):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    found = run_job(_in_turns, [Change(5, (1, 2, 3))], first=(1, 2))
    for weight in found.results.values():
        torch.testing.assert_close(weight, model.weight.detach(), rtol=0, atol=1e-5)


def test_optimizer_other_than_the_wrapped_one_is_refused() -> None:
    words = "Turns steps parameters of a wrapped model.* takes turns with others has them as attributes"
    with pytest.raises(RuntimeError, match=words):
        run_job(lambda: _in_turns(lambda own: torch.optim.SGD(own.param_groups[0]["params"])), first=(1, 2))


def test_optimizer_around_the_wrapped_one_is_told() -> None:
    told = run_job(lambda: _in_turns(lambda optimizer: optimizer.inner, Sam), first=(1, 2)).told
    assert {kind for kind, text, _ in told if "workers that join later get nothing of its state" in text} == {"warning"}


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _replaced(net: nn.Sequential) -> None:
    net[1] = nn.Linear(4, 4)


def _tied(net: nn.Sequential) -> None:
    net[1].weight = net[0].weight


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("change", [_replaced, _tied])
def test_layer_that_is_replaced_after_the_wrap_is_named(change: Any, workers: int) -> None:
    def train() -> None:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(net, optimizer)
        change(net)
        for _ in er.remaining_epochs_until(1):
            for (x,) in er.AdaptiveDataLoader(_data(), batch_size=12):
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                optimizer.step()

    with pytest.raises(ValueError, match=r"^1\.weight.* were replaced or tied after .* wrap last"):
        run_job(train, first=tuple(range(1, workers + 1)))


def test_a_replaced_head_belongs_before_the_optimizer() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net[1] = nn.Linear(4, 2)
    optimizer.add_param_group({"params": net[1].parameters()})
    with pytest.raises(ValueError, match=r"2 of its parameters belong elsewhere.*replaced since\? Make the optimizer"):
        er.AdaptiveDataParallel(net, optimizer)


def test_lazy_layers_are_told_to_see_a_batch_first() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"^0\.weight, 0\.bias of the model have no shape yet.*call the model once"):
        er.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net(torch.zeros(2, 3))
    er.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
