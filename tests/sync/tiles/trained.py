"""A model that is trained with optimizer state in tiles, and without, while the group changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from tests.loop.changing import Change, Hold, Kill, Outcome, run_job

SAMPLES, BATCH, EPOCHS = 96, 12, 3
STEPS = SAMPLES // BATCH * EPOCHS

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005, momentum=0.5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "foreach sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=True),
}


class Net(nn.Module):
    """Two groups of parameters, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(13, 57), nn.LayerNorm(57), nn.Linear(57, 5)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 13, generator=generator)
    return TensorDataset(x, (x[:, :5] + 0.3 * torch.randn(SAMPLES, 5, generator=generator)).argmax(1))


@dataclasses.dataclass(frozen=True)
class Case:
    """How it is trained."""

    optimizer: str = "adamw"
    strategy: Any = "zero1"
    clip: bool = True
    rule: str = "none"
    batch: Any = BATCH
    between: Callable[[Run, int], None] = lambda run, step: None


class Run:
    """One worker's: what it ended with, and what it held meanwhile."""

    def __init__(self, case: Case) -> None:
        self.model = Net()
        groups = [{"params": self.model.first.parameters()}, {"params": [*self.model.norm.parameters()], "lr": 0.02}]
        groups.append({"params": self.model.last.parameters()})
        self.optimizer = OPTIMIZERS[case.optimizer](groups)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.wrapped = er.AdaptiveDataParallel(
            self.model, self.optimizer, self.schedule, scaling_rule=case.rule, strategy=case.strategy
        )
        self.held: list[int] = []
        self.steps: dict[int, list[Tensor]] = {}
        step = 0
        loader = er.AdaptiveDataLoader(data(), batch_size=case.batch, seed=3, drop_last=True)
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, y in loader:
                step = er.get_context().get_global_step()
                case.between(self, step)
                self.steps.setdefault(step, [p.detach().clone() for p in self.model.parameters()])
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.wrapped(x), y).backward()
                if case.clip:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.held.append(self.elements())
        self.parameters = [p.detach().clone() for p in self.model.parameters()]
        self.saved = self.optimizer.state_dict()
        self.rank = er.get_context().get_world_rank()

    def elements(self) -> int:
        """Of optimizer state that this worker holds."""
        held = self.wrapped._steps[0].tiles._holder.held
        states = [*self.optimizer.state.values(), *(held.states.values() if held is not None else ())]
        return sum(value.numel() for state in states for value in state.values() if torch.is_tensor(value))


def run(case: Case, script: Sequence[Change | Kill | Hold], first: tuple[int, ...]) -> Outcome:
    """Train while the group changes."""
    return run_job(lambda: Run(case), script, first=first)


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Bit by bit."""
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert found["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][index][name]), torch.as_tensor(value)), (index, name)


def check(
    case: Case,
    script: Sequence[Change | Kill | Hold],
    first: tuple[int, ...],
    *,
    as_replicated: Sequence[Change | Kill | Hold] | None = None,
    exact: bool = True,
) -> Outcome:
    """Parameters of all workers, and the state that the first one gives, are those of replicated training.

    Args:
        case: what is trained.
        script: what becomes of the group.
        first: workers at the beginning.
        as_replicated: the same for workers that hold the whole state.
        exact: bit by bit; else without any change of the group, and up to rounding.
    """
    found = run(case, script, first)
    replicated = dataclasses.replace(case, strategy="all_reduce")
    if not exact:
        (undisturbed,) = run(replicated, [], (1,)).results.values()
        for own in found.results.values():
            for mine, theirs in zip(own.parameters, undisturbed.parameters, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
            if own.rank == 0:
                assert own.saved["state"].keys() == undisturbed.saved["state"].keys()
        return found
    wanted = run(replicated, script if as_replicated is None else as_replicated, first)
    assert found.groups == wanted.groups and found.results.keys() == wanted.results.keys()
    for worker, own in found.results.items():
        other = wanted.results[worker]
        for step in own.steps.keys() & other.steps.keys():
            assert all(map(torch.equal, own.steps[step], other.steps[step])), (worker, step)
        assert all(map(torch.equal, own.parameters, other.parameters)), worker
        if own.rank == 0:
            assert_same_state(own.saved, other.saved)
            fresh = OPTIMIZERS[case.optimizer]([{"params": g["params"]} for g in own.optimizer.param_groups])
            fresh.load_state_dict(own.saved)
    return found
