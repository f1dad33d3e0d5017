"""MoCo's queue of keys and DINO's centre, as their authors write them, through changes of the group.

Both keep what they have gathered from all ranks in buffers, which each forward pass changes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.session.default_group import install
from tests.loop.changing import Change, Kill, run_job

EPOCHS, SAMPLES, BATCH, FEATURES = 3, 48, 12, 4


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """As in a worker; the group of tests that make their own is left alone."""
    install()
    yield
    assert dist.get_backend() == "elastic_ray"


def encoder() -> nn.Module:
    made = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for number, p in enumerate(made.parameters()):
            p.copy_(torch.linspace(-0.7, 0.8, p.numel()).add(0.1 * number).sin().reshape(p.shape))
    return made


class Averaged(nn.Module):
    """A student, and a teacher that is the moving average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def move_teacher(self) -> None:
        """Change the teacher as the authors do, in ways that torch does not count as changes of a tensor."""
        for q, k in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            if isinstance(self, MoCo):
                k.data = k.data * 0.9 + q.data * 0.1
            else:
                k.data.mul_(0.9).add_(0.1 * q.detach().data)


class MoCo(Averaged):
    """Momentum contrast with a queue of keys (He et al. 2020), without the shuffle for BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        queue = torch.linspace(-1, 1, 3 * 2 * BATCH).mul(7).sin().reshape(3, 2 * BATCH)
        self.register_buffer("queue", functional.normalize(queue, dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        gathered = [torch.ones_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, keys, async_op=False)
        keys = torch.cat(gathered, dim=0)
        at = int(self.queue_ptr)
        self.queue[:, at : at + len(keys)] = keys.T
        self.queue_ptr[0] = (at + len(keys)) % self.queue.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        q = functional.normalize(self.student(x), dim=1)
        with torch.no_grad():
            self.move_teacher()
            k = functional.normalize(self.teacher(x.flip(1)), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / 0.2
        self.enqueue(k)
        return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class DINO(Averaged):
    """Self-distillation with a centre of the teacher's outputs (Caron et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(1, 3))

    @torch.no_grad()
    def update_center(self, outputs: Tensor) -> None:
        center = torch.sum(outputs, dim=0, keepdim=True)
        dist.all_reduce(center)
        center = center / (len(outputs) * dist.get_world_size())
        self.center = self.center * 0.9 + center * 0.1

    def forward(self, x: Tensor) -> Tensor:
        student = functional.log_softmax(self.student(x) / 0.1, dim=-1)
        with torch.no_grad():
            self.move_teacher()
            outputs = self.teacher(x.flip(1))
            teacher = functional.softmax((outputs - self.center) / 0.04, dim=-1)
            self.update_center(outputs)
        return torch.sum(-teacher * student, dim=-1).mean()


def train(kind: type[Averaged]) -> dict[str, Tensor]:
    model = kind()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.3, momentum=0.5)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(2))
    for _ in er.remaining_epochs_until(EPOCHS):
        for (rows,) in er.AdaptiveDataLoader(TensorDataset(x), batch_size=BATCH, shuffle=False):
            optimizer.zero_grad()
            wrapped(rows).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


GROWS = [Change(2, (1, 2, 3)), Change(6, (1, 3))]


@pytest.mark.parametrize("kind", [MoCo, DINO])
@pytest.mark.parametrize(
    "script", [GROWS, [Kill(3, 2, "collective")], [Kill(5, 2, "allreduce")]], ids=["grows", "collective", "allreduce"]
)
def test_what_forward_gathers_is_that_of_one_worker(kind: type[Averaged], script: Sequence[Any]) -> None:
    alone = run_job(lambda: train(kind), first=(1,)).results[1]
    for found in run_job(lambda: train(kind), script, first=(1, 2)).results.values():
        for name, value in alone.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
