"""Models whose parameters are on several devices: torch calls hooks in a thread of each, and numbers must not mix."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring.monitor import Monitor
from elastic_ray.parallel.finite_watch import total
from elastic_ray.sync import AllReduce
from elastic_ray.sync.statistics.gradient_meter import GradientMeter
from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics
from elastic_ray.sync.statistics.noise import NoiseTracker
from tests.loop.ranks import Ranks


class Another(torch.autograd.Function):
    """Begins a backward pass in another thread: in the place of a device's."""

    @staticmethod
    def forward(context: Any, x: Tensor, thread: threading.Thread) -> Tensor:
        context.thread = thread
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        context.thread.start()
        return gradient, None


class Joined(torch.autograd.Function):
    """Waits for its end."""

    @staticmethod
    def forward(context: Any, x: Tensor, thread: threading.Thread) -> Tensor:
        context.thread = thread
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        context.thread.join()
        return gradient, None


def two_threads(first: str, second: str) -> dict[str, Any]:
    """Gradients of two parameters come in two threads, while the first one waits for the other rank."""
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(300)), "b": nn.Parameter(torch.ones(300))})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=AllReduce(bucket_bytes=1024))
    failed: list[str] = []
    steps: list[list[str]] = []
    seen: list[str] = []
    reduction, consensus = wrapped._sync._reducer.reduction, current_session().consensus
    launch, agreed = reduction.launch, consensus.agreed

    def noted(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        result = call(*arguments)
        seen.append(name)
        return result

    reduction.launch = lambda index: noted("launched", launch, index)
    consensus.agreed = lambda: noted("agreed", agreed)
    for _epoch in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(TensorDataset(torch.ones(8, 300)), batch_size=4):
            rank = current_session().rank
            optimizer.zero_grad()

            def other(rank: int = rank) -> None:
                time.sleep(0.2)  # while the backward of the first runs
                try:
                    (model[second] * (1.0 + rank)).sum().backward()
                except Exception as error:
                    failed.append(repr(error))

            thread = threading.Thread(target=other)
            x = Joined.apply(x.requires_grad_(), thread).mean(0)
            loss = Another.apply((x * model[first] * (1.0 + rank)).sum(), thread)
            time.sleep(0.6 * rank)  # ranks come apart
            seen.clear()
            loss.backward()
            steps.append(list(seen))
            optimizer.step()
    return {"failed": failed, "steps": steps, "state": [p.detach().tolist() for p in wrapped.parameters()]}


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_gradients_of_several_threads_are_reduced_one_after_other(ranks: Ranks, order: str) -> None:
    for found in ranks.run(two_threads, *order, world=2):
        assert found["failed"] == [] and found["steps"][0] == ["agreed", "launched", "launched"]
        assert torch.allclose(torch.tensor(found["state"]), torch.full((2, 300), 1.0 - 2 * 0.1 * 1.5))


class _Measured:
    """A bucket on a GPU."""

    index, sliced = 0, False

    def __init__(self, group: int, gpu: int) -> None:
        self.group, self._gpu = group, gpu

    def squared_norm(self, preconditioner: object) -> Tensor:
        return torch.ones((), device=f"cuda:{self._gpu}")


@pytest.mark.parametrize("gpus", [(0, 1), (0, 0)])
def test_norms_of_buckets_on_two_gpus_add_up(gpus: tuple[int, ...]) -> None:
    """Fakes of torch's own say where tensors of two devices meet."""
    statistics = GradientStatistics(NoiseTracker(torch.optim.SGD([torch.zeros(1)], 0.1), 3), GradientMeter(Monitor))
    statistics.rebuilt(3)
    step: Any = SimpleNamespace(micro_steps=1, init_batch_size=4, halved=False)
    statistics.start_step(step, 0, replicas=2, exact=True, spacing=1)
    with FakeTensorMode():
        statistics.start_pass()
        for group, gpu in ((0, gpus[0]), (0, gpus[1]), (1, gpus[0])):  # nothing of group 2 is trained
            statistics.add(_Measured(group, gpu), 1.0)
        found = statistics.local_norms()
    assert [each.device.index if isinstance(each, Tensor) else each for each in found] == [0, 0, 0.0]


def test_the_largest_gradient_is_that_of_all_devices() -> None:
    with FakeTensorMode():
        norms = [torch.ones((), device=device, dtype=torch.float16) for device in ("cpu", "cuda:1", "cuda:0", "cuda:1")]
        found = total(norms)
    assert (found.device, found.dtype) == (torch.device("cuda:1"), torch.float32)
