"""A model that is trained in shards, and without, while the group changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_epoch
from tests.loop.changing import Change, Hold, Kill, Outcome, run_job

SAMPLES, BATCH, EPOCHS = 96, 12, 2
STEPS = SAMPLES // BATCH * EPOCHS
CLOSE = 2e-5  # rounding: sums over ranks are made in another order

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-2),
}


class Block(nn.Module):
    """A residual block; rows that no group of 2 to 4 divides evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 9), nn.Linear(9, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, and parameters outside of them: some with fewer rows than there are workers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(13, 7), nn.ModuleList([Block(7), Block(7)]), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))
        if self.scale.is_meta:
            return
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def sharded_net(**options: Any) -> Net:
    """The model, block by block, as users of torch do it."""
    model = Net()
    for block in model.blocks:
        er.fully_shard(block, **options)
    return er.fully_shard(model, **options)


def meta_net(**options: Any) -> Net:
    """The same, built without memory; what it begins with is as if it lay in a file."""
    values = Net().state_dict()
    with torch.device("meta"):
        model = Net()
    names = {each: f"{name}." if name else "" for name, each in model.named_modules()}

    def read(module: nn.Module) -> None:
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            value.copy_(values[names[module] + name])

    for block in model.blocks:
        er.fully_shard(block, param_init_fn=read, device="cpu", **options)
    return er.fully_shard(model, param_init_fn=read, device="cpu", **options)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 13, generator=generator)
    return TensorDataset(x, (x[:, :3] + 0.3 * torch.randn(SAMPLES, 3, generator=generator)).argmax(1))


def train_an_epoch(wrapped: Any, optimizer: torch.optim.Optimizer) -> None:
    """As plainly as it can be."""
    for _ in er.remaining_epochs_until(1):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()


@dataclasses.dataclass(frozen=True)
class Case:
    """How it is trained."""

    optimizer: str = "adamw"
    sharded: bool = True
    meta: bool = False
    clip: bool = True
    batch: int = BATCH
    micro: int | None = None
    nonfinite: str = "warn"
    between: Callable[[Run, int], None] = lambda run, step: None
    options: tuple[tuple[str, Any], ...] = ()


class Run:
    """One worker's: what it ended with, and what it held meanwhile."""

    def __init__(self, case: Case) -> None:
        self.case = case
        make = meta_net if case.meta else sharded_net
        self.model = make(**dict(case.options)) if case.sharded else Net()
        groups = [{"params": self.model.blocks.parameters()}]
        groups.append({"params": [p for n, p in self.model.named_parameters() if "blocks" not in n], "lr": 0.02})
        self.optimizer = OPTIMIZERS[case.optimizer](groups)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.wrapped = er.AdaptiveDataParallel(
            self.model, self.optimizer, self.schedule, scaling_rule="none", nonfinite=case.nonfinite
        )
        self.held: list[int] = []
        self.losses: dict[int, float] = {}
        self.objects = [id(p) for p in self.model.parameters()]
        self.dataset = data()
        loader = er.AdaptiveDataLoader(self.dataset, batch_size=case.batch, seed=3, drop_last=True)
        if case.micro is not None:
            loader.autoscale_batch_size(case.batch, local_bsz_bounds=(1, case.micro), gradient_accumulation=True)
        for _ in er.remaining_epochs_until(EPOCHS):
            total = er.Accumulator()
            for x, y in loader:
                case.between(self, er.get_context().get_global_step())
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.wrapped(x), y)
                loss.backward()
                total["loss"] += loss.item() * len(y)
                if case.clip:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.held.append(self.elements())
            self.losses[current_epoch()] = total["loss"] / SAMPLES
        self.rank = er.get_context().get_world_rank()
        self.saved = self.optimizer.state_dict()
        self.parameters = self.model.state_dict()
        assert [id(p) for p in self.model.parameters()] == self.objects, "parameters stay the objects that they were"

    def elements(self) -> int:
        """That this worker has memory of for optimizer state."""
        states = list(self.optimizer.state.values())
        if self.case.sharded:
            shards = self.wrapped._steps[0].tiles.shards._holder._held.shards
            states += [state for shard in shards.values() for state in shard.states.values()]
        kept = [v for state in states for v in state.values() if torch.is_tensor(v) and v.dim()]
        storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() // v.element_size() for v in kept}
        return sum(storages.values())


def run(case: Case, script: Sequence[Change | Kill | Hold], first: tuple[int, ...]) -> Outcome:
    """Train while the group changes."""
    return run_job(lambda: Run(case), script, first=first)


_REFERENCES: dict[Case, Run] = {}


def reference(case: Case) -> Run:
    """The same without shards, in one process, undisturbed."""
    plain = dataclasses.replace(case, sharded=False, meta=False, micro=None, options=())
    if plain not in _REFERENCES:
        (_REFERENCES[plain],) = run(plain, [], (1,)).results.values()
    return _REFERENCES[plain]


def check(
    case: Case, script: Sequence[Change | Kill | Hold], first: tuple[int, ...], *, close: float = CLOSE
) -> Outcome:
    """What rank 0 ends with, parameters and optimizer state, is that of plain training; all ranks know its loss."""
    found, wanted = run(case, script, first), reference(case)
    (whole,) = [own for own in found.results.values() if own.rank == 0]
    assert whole.parameters.keys() == wanted.parameters.keys()
    for name, value in wanted.parameters.items():
        torch.testing.assert_close(whole.parameters[name], value, rtol=0, atol=close, msg=lambda m: f"{name}: {m}")  # noqa: B023
    assert whole.saved["param_groups"] == wanted.saved["param_groups"]
    names = [name for name, _ in wanted.model.named_parameters()]
    assert whole.saved["state"].keys() == wanted.saved["state"].keys(), names
    for index, state in wanted.saved["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(whole.saved["state"][index][key], value, rtol=0, atol=close)
    for own in found.results.values():
        for epoch, loss in own.losses.items():
            # A step that is drawn again after its update has the loss behind it.
            near = 5e-3 if any(isinstance(each, Kill) for each in script) else 1e-4
            assert abs(loss - wanted.losses[epoch]) < near, (epoch, loss, wanted.losses)
    fresh = Net()
    fresh.load_state_dict(whole.parameters)
    plain = OPTIMIZERS[case.optimizer]([{"params": g["params"]} for g in _groups(fresh)])
    plain.load_state_dict(whole.saved)
    return found


def _groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(model.blocks.parameters())},
        {"params": [p for n, p in model.named_parameters() if "blocks" not in n]},
    ]
