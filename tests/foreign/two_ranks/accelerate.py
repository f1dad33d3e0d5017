"""Cases of Accelerate's tests: its ``Accelerator`` on two processes beside ours."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader

import elastic_ray as er
from elastic_ray.integrations.huggingface import Accelerator
from tests.foreign.two_ranks.common import BATCH, group_hidden, numbers, run, weights

warnings.filterwarnings("ignore")
EPOCHS = 2


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def accelerator(elastic: bool, **options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state()  # another precision needs another
    if not elastic:
        return accelerate.Accelerator(cpu=True, **options)
    with group_hidden():
        return Accelerator(cpu=True, **options)


def epochs(elastic: bool, count: int = EPOCHS) -> Any:
    return er.remaining_epochs_until(count) if elastic else range(count)


class Run:
    """A loop as Accelerate's docs have it, with what a case changes of it."""

    def __init__(
        self,
        elastic: bool,
        *,
        samples: int = 40,
        batch: int = BATCH,
        clip: Any = None,
        schedule: Any = None,
        per_epoch: bool = False,
        apart: bool = False,
        accumulate: bool = False,
        load: Path | None = None,
        count: int = EPOCHS,
        **options: Any,
    ) -> None:
        self.elastic, self.seen, self.steps = elastic, list[Any](), 0
        self.accelerator = accelerator(elastic, **options)
        self.net = net()
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), 0.05)
        self.schedule = schedule(self.optimizer, 1 if elastic or per_epoch else 2) if schedule else None
        loader: Any = DataLoader(numbers(samples), (2 if elastic else 1) * batch)
        parts = [self.net, self.optimizer, loader]
        if (self.schedule is not None and not per_epoch) or (self.schedule is not None and elastic):
            parts.append(self.schedule)
        self.model, self.optimizer, self.loader, *rest = self.accelerator.prepare(*parts)
        self.schedule = rest[0] if rest else self.schedule
        if load is not None:
            self.accelerator.load_state(str(load))
        for _ in epochs(elastic, count):
            for index, (x, y) in enumerate(self.loader):
                first = apart and index % 2 == 0
                with contextlib.ExitStack() as within:
                    if first:
                        within.enter_context(self.accelerator.no_sync(self.model))
                    if accumulate:
                        within.enter_context(self.accelerator.accumulate(self.model))
                    with self.accelerator.autocast():
                        loss = torch.nn.functional.cross_entropy(self.model(x), y)
                    self.accelerator.backward(loss)
                    if not first and (elastic or not accumulate or self.accelerator.sync_gradients):
                        self.step(clip, per_epoch)
            if per_epoch and self.schedule is not None:
                self.schedule.step()

    def step(self, clip: Any, per_epoch: bool) -> None:
        if clip is not None:
            found = getattr(self.accelerator, clip)(self.model.parameters(), 0.05)
            self.seen.append(None if found is None else float(found))
        self.optimizer.step()
        if self.schedule is not None and not per_epoch:
            self.schedule.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.seen.append(self.optimizer.param_groups[0]["lr"])

    def record(self, **more: Any) -> dict[str, Any]:
        kept = self.optimizer.state_dict()["state"]
        return {"weights": weights(self.net), "steps": self.steps, "seen": self.seen, "optimizer": kept, **more}


def trained(**given: Any) -> Any:
    return lambda elastic, folder: Run(elastic, **given).record()


def accumulated(elastic: bool, folder: Path) -> dict[str, Any]:
    """Two micro-batches a step of each process: theirs by count, ours by the largest that a worker takes."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    if elastic:
        options = {"max_batch_size": 4 * BATCH, "local_bsz_bounds": (1, BATCH), "gradient_accumulation": True}
    found = Run(elastic, samples=64, batch=(2 if elastic else 1) * BATCH, accumulate=True, **options).record()
    return {"weights": found["weights"]}


def half_each(optimizer: Any, steps: int) -> Any:
    """Theirs steps a schedule as often as there are processes: ``steps`` has it last as long."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 3 * steps, 0.5)


def gathered(elastic: bool, folder: Path) -> dict[str, Any]:
    """Metrics over an evaluation whose samples do not divide: each counts once."""
    trained = Run(elastic)
    loader: Any = DataLoader(numbers(37), 2 * BATCH if elastic else BATCH)
    loader = trained.accelerator.prepare(loader)
    found, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            values, wanted = trained.accelerator.gather_for_metrics((trained.model(x).argmax(1), y))
            found.append(values)
            labels.append(wanted)
    right, truth = torch.cat(found), torch.cat(labels)
    return trained.record(count=len(right), right=int((right == truth).sum()), labels=truth)


def collectives(elastic: bool, folder: Path) -> dict[str, Any]:
    trained = Run(elastic)
    mine, rank = trained.accelerator, trained.accelerator.process_index
    seen: dict[str, Any] = {}

    def in_a_step() -> None:
        own = torch.arange(3.0) + rank
        seen["sum"], seen["mean"] = mine.reduce(own, "sum"), mine.reduce(own, "mean")
        seen["gathered"] = mine.gather({"a": own, "b": [own * 2]})
        seen["padded"] = mine.pad_across_processes(torch.ones(2 + rank), pad_index=7)
        seen["who"] = [mine.num_processes, mine.process_index, mine.is_main_process, mine.is_local_main_process]
        if rank == 1:
            mine.set_trigger()
        seen["trigger"] = [mine.check_trigger(), mine.check_trigger()]

    in_a_step()
    mine.wait_for_everyone()
    return seen


def saved(elastic: bool, folder: Path) -> dict[str, Any]:
    """``save_state`` of either is loaded by ours, and theirs by theirs."""
    first = Run(elastic)
    first.accelerator.wait_for_everyone()
    first.accelerator.save_state(str(folder / "state"))
    first.accelerator.wait_for_everyone()
    found: dict[str, Any] = {"first": first.record()}
    for written in ("theirs", "ours"):
        state = folder.parent / (written if elastic else "theirs") / "state"
        done = EPOCHS if elastic and written == "ours" else 0  # its own state also tells where the job was
        found[written] = Run(elastic, load=state, count=done + 1).record()
    return found


def linear(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def unused(elastic: bool, folder: Path) -> dict[str, Any]:
    handler = accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)
    return Run(elastic, kwargs_handlers=[handler]).record()


CASES: dict[str, Any] = {
    "plain": trained(),
    "clipping": trained(clip="clip_grad_norm_"),
    "clipping by value": trained(clip="clip_grad_value_"),
    "bfloat16": trained(mixed_precision="bf16"),
    "a schedule per step": trained(schedule=half_each),
    "a schedule per epoch": trained(schedule=linear, per_epoch=True),
    "no_sync": trained(samples=64, apart=True),
    "a short last batch": trained(samples=36),
    "gather_for_metrics": gathered,
    "collectives": collectives,
    "save_state and load_state": saved,
    "accumulation by the loader": accumulated,
    "accumulation": trained(accumulate=True, gradient_accumulation_steps=2),
    "find_unused_parameters": unused,
}

if __name__ == "__main__":
    run(CASES)
