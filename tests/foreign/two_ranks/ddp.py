"""Loops of torch's users and of its tests: ``DistributedDataParallel`` beside ``AdaptiveDataParallel``."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elastic_ray as er
from tests.foreign.two_ranks.common import BATCH, numbers, plain, run, weights

EPOCHS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Branches(Net):
    """A rank leaves a layer out for samples of its own, or all ranks do, by the sign of the first number."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.by_rank, self.calls = by_rank, 0

    def forward(self, x: Tensor, **options: Any) -> Any:
        self.calls += 1
        x = torch.tanh(self.first(x))
        if er_rank() == self.calls % 2 if self.by_rank else self.calls % 2:
            x = torch.tanh(self.second(x))
        return self.last(x)


class Tied(Net):
    """One matrix in two layers, one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(5, 5)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor, **options: Any) -> Any:
        x = torch.tanh(self.second(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return self.last(torch.tanh(self.third(x)))


class Recomputed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor, **options: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(lambda x: torch.tanh(self.second(x)), torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return self.last(x)


class Looked(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.last(self.table((x[:, 0].abs() * 3).long().clamp(max=6)))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wave, self.last = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64)), nn.Linear(4, 2)

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.last((x.to(torch.complex64) @ self.wave).abs())


class Nested(Net):
    """Gives a dict of tuples, and takes arguments by name."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        return {"out": (super().forward(x) * options.get("times", 1.0), None)}


class Normed(Net):
    """Its statistics are those of all samples that a rank sees in turn: what is compared is weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.last(self.norm(self.first(x)))


def er_rank() -> int:
    group = torch.distributed
    return group.get_rank() if group.is_initialized() else er.get_context().get_world_rank()


def meet(elastic: bool) -> None:
    """Theirs begins with a process group."""
    if not elastic and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))


def wrapped(
    elastic: bool, net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, **options: Any
) -> Any:
    meet(elastic)
    if elastic:
        return er.AdaptiveDataParallel(net, optimizer, lr_scheduler=scheduler, **options)
    return DistributedDataParallel(net, **options)


def loaded(elastic: bool, samples: int, batch: int = BATCH) -> Any:
    data = numbers(samples)
    if elastic:
        return er.AdaptiveDataLoader(data, batch_size=2 * batch, shuffle=False)
    return DataLoader(data, batch_sampler=halves(samples, batch))


def halves(samples: int, batch: int) -> list[list[int]]:
    """Of theirs: this rank's half of each batch, which are the samples that the rank has of ours, too."""
    whole = [list(range(samples))[begin : begin + 2 * batch] for begin in range(0, samples, 2 * batch)]
    return [each[: len(each) // 2] if er_rank() == 0 else each[len(each) // 2 :] for each in whole]


def epochs(elastic: bool, count: int = EPOCHS) -> Any:
    return er.remaining_epochs_until(count) if elastic else range(count)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def step_of_one_batch(run: Any, index: int, x: Tensor, y: Tensor) -> None:
    """The step of a plain loop."""
    loss_of(run.model, x, y).backward()
    run.step()


class Run:
    """A training, with what a case changes of it."""

    def __init__(
        self,
        elastic: bool,
        *,
        net: Callable[[], nn.Module] = Net,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        scheduler: Callable[[Any], Any] | None = None,
        per_epoch: bool = False,
        samples: int = 40,
        batch: int = BATCH,
        step: Callable[[Any, int, Tensor, Tensor], None] = step_of_one_batch,
        after: Callable[[Any], Any] = lambda run: None,
        options: dict[str, Any] | None = None,
        count: int = EPOCHS,
    ) -> None:
        self.elastic, self.net, self.steps, self.seen = elastic, net(), 0, list[Any]()
        self.optimizer = optimizer(self.net.parameters())
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.model = wrapped(elastic, self.net, self.optimizer, self.scheduler, **(options or {}))
        self.loader, self.per_epoch = loaded(elastic, samples, batch), per_epoch
        for _ in epochs(elastic, count):
            for index, (x, y) in enumerate(self.loader):
                step(self, index, x, y)
            if self.scheduler is not None and per_epoch:
                self.scheduler.step()
        self.after = after(self)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.scheduler is not None and not self.per_epoch:
            self.scheduler.step()
        self.seen.append(self.optimizer.param_groups[0]["lr"])

    def record(self) -> dict[str, Any]:
        return {"weights": weights(self.net), "steps": self.steps, "seen": self.seen, "after": self.after}


# --- steps


def clipped(run: Run, index: int, x: Tensor, y: Tensor) -> None:
    loss_of(run.model, x, y).backward()
    run.seen.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
    run.step()


def in_bfloat16(run: Run, index: int, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(run.model, x, y)
    loss.backward()
    run.step()


def accumulated(run: Run, index: int, x: Tensor, y: Tensor) -> None:
    (loss_of(run.model, x, y) / 2).backward()
    if index % 2:
        run.step()


def accumulated_apart(run: Run, index: int, x: Tensor, y: Tensor) -> None:
    if index % 2:
        accumulated(run, index, x, y)
    else:
        with run.model.no_sync():
            accumulated(run, index, x, y)


def two_passes(run: Run, index: int, x: Tensor, y: Tensor) -> None:
    """Two forward passes for one backward."""
    (loss_of(run.model, x, y) + loss_of(run.model, -x, 1 - y)).backward()
    run.step()


def nested(run: Run, index: int, x: Tensor, y: Tensor) -> None:
    found = run.model(x=x, times=2.0)["out"][0]
    nn.functional.cross_entropy(found, y).backward()
    run.step()


def frozen_midway(run: Run, index: int, x: Tensor, y: Tensor) -> None:
    if run.steps == 5:
        run.net.second.requires_grad_(False)
    loss_of(run.model, x, y).backward()
    run.step()


def gradients(run: Run, index: int, x: Tensor, y: Tensor) -> None:
    """What a loop reads of ``.grad`` between backward and step."""
    loss_of(run.model, x, y).backward()
    run.seen += [None if p.grad is None else plain(p.grad.norm()) for p in run.net.parameters()]
    run.step()


def evaluated(run: Run) -> Any:
    """The accuracy over all ranks' samples, gathered as each side does it."""
    data = numbers(24)
    rank = er_rank()
    x, y = data.tensors
    with torch.no_grad():
        run.model.eval()
        right = (run.model(x[rank::2]).argmax(1) == y[rank::2]).float()
    if run.elastic:
        gathered = er.all_gather(right)
    else:
        gathered = [torch.zeros_like(right) for _ in range(2)]
        torch.distributed.all_gather(gathered, right)
    return plain(torch.cat(gathered))


def keys(run: Run) -> Any:
    """What a checkpoint is made of, and the whole state by torch's own functions."""
    of_model, of_optimizer = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    return {
        "wrapper": plain(dict(run.model.state_dict())),
        "torch": plain(dict(of_model)),
        "inner": plain(dict(get_model_state_dict(run.net))),
        "layer": plain(dict(get_model_state_dict(run.model, submodules={run.net.second}))),
        "optimizer": plain(dict(of_optimizer)),
        "own": plain(run.optimizer.state_dict()),
    }


# --- cases


def trained(**given: Any) -> Any:
    def case(elastic: bool, folder: Path) -> dict[str, Any]:
        options = dict(given)
        if elastic:
            options["options"] = options.pop("ours", None)
        else:
            options.pop("ours", None)
        return Run(elastic, **options).record()

    return case


def resumed(elastic: bool, folder: Path) -> dict[str, Any]:
    """A checkpoint of each side, written and read as torch's tutorial does, is continued by the other."""
    first = Run(elastic, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), per_epoch=True)
    state = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}
    if er_rank() == 0:
        torch.save(state, folder / "state.pt")
    found: dict[str, Any] = {"saved": plain(state)}
    if not elastic:
        torch.distributed.barrier()
    for written in ("theirs", "ours") if elastic else ("theirs",):
        state = torch.load(folder.parent / written / "state.pt")
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        model = wrapped(elastic, net, optimizer)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for _ in epochs(elastic, 1):
            for x, y in loaded(elastic, 40):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        found[written] = weights(net)
    found["ours"] = found.get("ours", found["theirs"])
    return found


def resumed_by_torch(elastic: bool, folder: Path) -> dict[str, Any]:
    """The same by torch's functions: rank 0 has the state and shares it; of theirs, which then hangs, each rank has."""

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, 0.05)

    first = Run(elastic, optimizer=adam)
    state = get_state_dict(first.model, first.optimizer, options=StateDictOptions(full_state_dict=True))
    net = Net()
    optimizer = adam(net.parameters())
    model = wrapped(elastic, net, optimizer)
    of_model, of_optimizer = state if er_rank() == 0 or not elastic else ({}, {})
    options = StateDictOptions(full_state_dict=elastic, broadcast_from_rank0=elastic)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)
    for _ in epochs(elastic, 1):
        for x, y in loaded(elastic, 40):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    return {"weights": weights(net), "optimizer": plain(optimizer.state_dict())}


def synced_norm(elastic: bool, folder: Path) -> dict[str, Any]:
    return Run(elastic, net=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Normed())).record()


def joined(elastic: bool, folder: Path) -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = wrapped(elastic, net, optimizer)
    with model.join(throw_on_early_termination=True):
        for _ in epochs(elastic):
            for x, y in loaded(elastic, 40):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
    return {"weights": weights(net)}


def left_out(elastic: bool, folder: Path) -> dict[str, Any]:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["second.weight"])
    wrapped(elastic, net, torch.optim.SGD(net.parameters(), 0.1))
    return {}


def hooked(elastic: bool, folder: Path) -> dict[str, Any]:
    net = Net()
    model = wrapped(elastic, net, torch.optim.SGD(net.parameters(), 0.1))
    model.register_comm_hook(None, lambda state, bucket: bucket)
    return {"hooked": True}


def in_one_process_too(elastic: bool, folder: Path) -> dict[str, Any]:
    """Beside torch's sampler, which gives some samples twice, stands what one process does."""
    if elastic:
        return Run(elastic, samples=37).record()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in DataLoader(numbers(37), 2 * BATCH):
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
    return {"weights": weights(net), "steps": 5 * EPOCHS, "seen": [0.1] * 5 * EPOCHS, "after": None}


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10, cycle_momentum=False)


CASES: dict[str, Any] = {
    "plain": trained(after=evaluated),
    "adamw": trained(optimizer=lambda params: torch.optim.AdamW(params, 0.05)),
    "what is saved": trained(after=keys),
    "accumulation": trained(samples=64, step=accumulated),
    "accumulation in no_sync": trained(samples=64, step=accumulated_apart),
    "clipping": trained(step=clipped),
    "bfloat16": trained(step=in_bfloat16),
    "a schedule per step": trained(scheduler=one_cycle),
    "a schedule per epoch": trained(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.3), per_epoch=True),
    "a layer that no rank uses": trained(
        net=lambda: Branches(False), options={"find_unused_parameters": True}, step=gradients
    ),
    "a layer that one rank uses": trained(
        net=lambda: Branches(True), options={"find_unused_parameters": True}, step=gradients
    ),
    "tied weights": trained(net=Tied),
    "recomputed": trained(net=lambda: Recomputed(False)),
    "recomputed, reentrant": trained(net=lambda: Recomputed(True)),
    "sparse gradients": trained(net=Looked, optimizer=lambda params: torch.optim.SGD(params, 0.1)),
    "complex parameters": trained(net=Complex),
    "two forward passes": trained(step=two_passes),
    "nested outputs": trained(net=Nested, step=nested),
    "frozen midway": trained(step=frozen_midway, options={"find_unused_parameters": True}),
    "a short last batch": trained(samples=36),
    "batches that do not divide": in_one_process_too,
    "resumed": resumed,
    "resumed by torch's functions": resumed_by_torch,
    "find_unused_parameters": trained(options={"find_unused_parameters": True}, ours={"find_unused_parameters": True}),
    "static_graph": trained(options={"static_graph": True}, ours={"static_graph": True}),
    "SyncBatchNorm": synced_norm,
    "join": joined,
    "a communication hook": hooked,
    "parameters that are left out": left_out,
}

if __name__ == "__main__":
    run(CASES)
