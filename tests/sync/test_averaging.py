"""Models that are averaged instead of gradients: each algorithm equals its formula, worked out in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.sync import Strategy
from elastic_ray.sync.averaging.algorithms import DiLoCoAverager
from elastic_ray.sync.spec import Average
from tests.loop.changing import run_job
from tests.loop.ranks import Ranks
from tests.sync.averages import AVERAGES
from tests.sync.drifting import Loop, adam, net, reference, rows, sgd


def train(average: Average, make: Any) -> Any:
    return Loop(Strategy(average=average), make)()


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", [each for each in AVERAGES if each != "pair"])
def test_the_model_is_that_of_the_formula(ranks: Ranks, name: str, world: int, make: Any) -> None:
    wanted, means = reference(AVERAGES[name], world, make)
    found = ranks.run(train, AVERAGES[name], make, world=world)
    assert all(torch.equal(model, found[0][0]) for model, _ in found), "all end with one model"
    torch.testing.assert_close(found[0][0], wanted, rtol=0, atol=1e-9)
    for step, mean in enumerate(means):
        replicas = torch.stack([seen[step].after for _, seen in found])
        torch.testing.assert_close(replicas.mean(0), mean, rtol=0, atol=1e-9)
        assert not torch.equal(replicas[0], replicas[1]), "between averages they differ"


def test_pass_that_ends_the_averaging_compares_replicas() -> None:
    """A frozen parameter, which no average makes equal, differs in the pass's last step."""
    passes: list[int] = []

    def train() -> None:
        model = net()
        model.register_parameter("frozen", torch.nn.Parameter(torch.zeros(2), requires_grad=False))
        strategy = Strategy(average=Average(algorithm="local_sgd", period=5, until=5))
        optimizer = sgd(model)
        wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy)
        context = er.get_context()
        for epoch in er.remaining_epochs_until(3):
            passes.append(epoch)
            for x, _ in er.AdaptiveDataLoader(rows(), batch_size=12):
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
                if context.get_global_step() == 4 and context.get_world_rank() == 1:
                    model.frozen.fill_(1.0)

    with pytest.raises(ReplicasDifferError, match=r"after 5 steps: frozen"):
        run_job(train, first=(1, 2))
    assert set(passes) == {0}


def test_an_outer_optimizers_checkpoint_goes_to_its_parameters() -> None:
    param = torch.ones(3, device="meta")  # takes the place of a GPU
    outer = DiLoCoAverager(0.7, 0.9)
    outer.restore({"anchor": {"w": torch.ones(3)}, "momentum": {"w": torch.ones(3)}})
    model: Any = SimpleNamespace(named={"w": param})
    outer.start(model)
    captured = outer.capture()
    assert [captured[key]["w"].device for key in ("anchor", "momentum")] == [param.device] * 2
