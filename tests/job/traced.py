"""A train loop that writes down what every rank did, and what must be true of such a trace."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np


def train(config: dict[str, Any]) -> str:
    """Train a small network.

        ``config``: trace (folder), samples, width (of the network), batch_size, epochs, pause_s, adapt, checkpoint,
        checkpoint_at (step), raise_at (step), disk_fails_at (step at which one worker's disk does, once), hold_lock_at
        (step) and hold_lock_s, starve (folder: the second process to build its model runs out of memory), tear_at
        (step), tear (ranks that then run out of memory half-way through optimizer.step(), once each), skip_at and
        return_at (steps at which rank 1 does something else than the others), nan_at (step at which rank 1's loss is
        NaN), nonfinite, rank_0_reports (no other rank calls ``report``), own_policy (of the model), raise_at_end
    (rank 1 does), bad_node (a file with Ray's id of a node on which every start fails), orders (folder: who takes
    away its file "disk" or "data" is the one whose disk fails in a step of rank 1, or that cannot read its data at the
    start; with the file "enough" training ends with the epoch).
    """
    import ray
    import torch

    import elastic_ray as er
    from elastic_ray.loop.api import current_session

    if "bad_node" in config and ray.get_runtime_context().get_node_id() == Path(config["bad_node"]).read_text():
        raise ImportError("libcudart.so.12: cannot open shared object file")
    if "orders" in config and _taken(Path(config["orders"]) / "data"):
        raise OSError(5, "Input/output error", "/data/shard-4")
    if "starve" in config and not _first_in(Path(config["starve"])):
        raise MemoryError("no room for the model")
    torch.manual_seed(0)
    samples = int(config.get("samples", 192))
    inputs = torch.randn(samples, 12)
    targets = (inputs.sum(1) > 0).long()
    width = int(config.get("width", 16))
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(12, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    )
    optimizer = (_torn_adam(config) if "tear_at" in config else torch.optim.Adam)(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
    model = er.AdaptiveDataParallel(
        model,
        optimizer,
        lr_scheduler=scheduler,
        nonfinite=config.get("nonfinite", "warn"),
        policy=config.get("own_policy"),
    )
    dataset = torch.utils.data.TensorDataset(inputs, targets, torch.arange(samples))
    loader = er.AdaptiveDataLoader(dataset, batch_size=int(config.get("batch_size", 24)))
    if "adapt" in config:
        loader.autoscale_batch_size(**config["adapt"])
    if er.get_checkpoint() is not None:
        with er.get_checkpoint().as_directory() as folder:
            saved = torch.load(os.path.join(folder, "state.pt"))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    trace = Trace(Path(config["trace"]))
    context = er.get_context()
    generation = -1
    for epoch in er.remaining_epochs_until(int(config.get("epochs", 4))):
        sums = er.Accumulator()
        for x, y, index in loader:
            if context.get_generation() != generation:
                generation = context.get_generation()
                trace.write("state", hash=state_hash(model, optimizer, scheduler))
            trace.write("step", epoch=epoch, indices=index.tolist(), cut=current_session().shape_changes)
            own = context.get_global_step() if context.get_world_rank() == 1 else -1
            if config.get("linger_at") == context.get_global_step() and context.get_world_rank() == 0:
                time.sleep(2.0)  # it lingers, as asked
            if config.get("return_at") == own:
                return "early"
            if config.get("skip_at") == own:
                continue
            if "orders" in config and own >= 0 and _taken(Path(config["orders"]) / "disk"):
                raise OSError(5, "Input/output error", "/data/shard-17")
            if config.get("disk_fails_at", math.inf) <= own and _touched_first(Path(config["trace"]) / "disk"):
                raise OSError(5, "Input/output error", "/data/shard-17")
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if config.get("nan_at") == own:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            scheduler.step()
            sums["loss"] += loss.item() * len(y)
            sums["samples"] += len(y)
            sums["enough"] += float("orders" in config and (Path(config["orders"]) / "enough").exists())
            time.sleep(float(config.get("pause_s", 0.02)))  # a job long enough for what is done to it
            if config.get("hold_lock_at") == context.get_global_step() and context.get_world_rank() == 1:
                ctypes.PyDLL(None).usleep(int(config["hold_lock_s"] * 1e6))
            if config.get("checkpoint_at") == context.get_global_step():
                er.report({}, checkpoint=_checkpoint(config, model, optimizer, scheduler, context))
            if config.get("raise_at") == context.get_global_step():
                raise KeyError("the user's own mistake")
        metrics = {"loss": sums["loss"] / sums["samples"], "samples": sums["samples"], "epoch": epoch}
        if not config.get("rank_0_reports") or context.get_world_rank() == 0:
            er.report(metrics, checkpoint=_checkpoint(config, model, optimizer, scheduler, context))
        if sums["enough"]:
            break
    if config.get("raise_at_end") and context.get_world_rank() == 1:
        raise KeyError("in the last evaluation")
    final = state_hash(model, optimizer, scheduler)
    told = current_session().progress.summary()
    trace.write("final", hash=final, done=told.done, epoch_ends=told.epoch_ends)
    return final


def _checkpoint(config: dict[str, Any], model: Any, optimizer: Any, scheduler: Any, context: Any) -> Any:
    if not (config.get("checkpoint") or "checkpoint_at" in config) or context.get_world_rank() != 0:
        return None
    import tempfile

    import torch
    from ray.train import Checkpoint

    folder = tempfile.mkdtemp()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, os.path.join(folder, "state.pt"))
    return Checkpoint.from_directory(folder)


def _torn_adam(config: dict[str, Any]) -> Any:
    """An optimizer that runs out of memory when it has changed half of the parameters."""
    import torch

    import elastic_ray as er

    class TornAdam(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            context = er.get_context()
            rank, torn = context.get_world_rank(), Path(config["trace"]) / f"torn-{context.get_world_rank()}"
            if context.get_global_step() == config["tear_at"] and rank in config["tear"] and not torn.exists():
                torn.touch()
                params = self.param_groups[0]["params"]
                with torch.no_grad():
                    for p in params[: len(params) // 2]:
                        p.add_(1.0)
                raise MemoryError("scripted, half-way through optimizer.step()")
            return super().step(closure)

    return TornAdam


def _touched_first(path: Path) -> bool:
    """Whether the file was not there; it is, afterwards."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _taken(path: Path) -> bool:
    """Whether the file was there; it is not, afterwards."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _first_in(folder: Path) -> bool:
    """Whether this process is the first to ask, or comes after the second."""
    for name in ("first", "second"):
        try:
            (folder / name).touch(exist_ok=False)
            return name == "first"
        except FileExistsError:
            continue
    return True


def state_hash(model: Any, optimizer: Any, scheduler: Any) -> str:
    """A digest of everything that ranks must share, bit by bit."""
    import torch

    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().numpy().tobytes())
    state = optimizer.state_dict()
    for values in state["state"].values():
        for key in sorted(values):
            value = values[key]
            digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    digest.update(repr([group["lr"] for group in state["param_groups"]]).encode())
    digest.update(repr(scheduler.last_epoch).encode())
    return digest.hexdigest()[:16]


class Trace:
    """One process's lines; each is on its way to the disk before the training continues."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / f"{os.getpid()}-{time.monotonic_ns()}.jsonl", "a")  # noqa: SIM115

    def write(self, kind: str, **values: Any) -> None:
        """Add a line."""
        import elastic_ray as er

        context = er.get_context()
        line = {
            "kind": kind,
            "time": time.time(),
            "pid": os.getpid(),
            "generation": context.get_generation(),
            "rank": context.get_world_rank(),
            "world": context.get_world_size(),
            "step": context.get_global_step(),
            **values,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@dataclasses.dataclass(frozen=True)
class Account:
    """What a trace says.

    Attributes:
        epochs: indices in the order of use, by epoch.
        worlds: world sizes of the committed steps, in order, repetitions left out.
        longest_gap_s: longest time between the beginnings of two successive committed steps.
        pids: processes that took part.
        final: digests at the end.
        progress: what all ranks say of it at the end: ``(done, ends of epochs)``, in steps at the initial batch.
    """

    epochs: dict[int, list[int]]
    worlds: list[int]
    longest_gap_s: float
    pids: set[int]
    final: set[str]
    progress: set[tuple[float, tuple[float, ...]]]


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines, in order of time."""
    lines = []
    for path in folder.glob("*.jsonl"):
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue  # the last line of a killed process
    return sorted(lines, key=lambda line: float(line["time"]))


def account(folder: Path, *, samples: int = 192) -> Account:
    """Check the invariants that hold for every job; returns the rest for the test's own checks."""
    lines = read(folder)
    check_identical(lines)
    steps: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for line in lines:
        if line["kind"] == "step":
            steps[line["step"]].append(line)
    assert sorted(steps) == list(range(len(steps))), "a step is missing"
    epochs: dict[int, list[int]] = collections.defaultdict(list)
    worlds: list[int] = []
    begins: list[float] = []
    for number in sorted(steps):
        newest = max(line["generation"] for line in steps[number])  # earlier ones were lost and drawn again
        micro_steps = [line for line in steps[number] if line["generation"] == newest]
        cuts = {line["rank"]: line["cut"] for line in micro_steps}  # so were those that did not fit into memory
        micro_steps = [line for line in micro_steps if line["cut"] == cuts[line["rank"]]]
        ranks, world = {line["rank"] for line in micro_steps}, micro_steps[0]["world"]
        assert sorted(ranks) == list(range(world)), f"step {number}: ranks {sorted(ranks)} of {world}"
        for line in micro_steps:
            epochs[line["epoch"]] += line["indices"]
        worlds += [world] if not worlds or worlds[-1] != world else []
        begins.append(min(line["time"] for line in micro_steps))
    for epoch, indices in epochs.items():
        assert sorted(indices) == list(range(samples)), f"epoch {epoch}: not every sample exactly once"
    return Account(
        epochs=dict(epochs),
        worlds=worlds,
        longest_gap_s=float(np.max(np.diff(begins))),
        pids={int(line["pid"]) for line in lines},
        final={str(line["hash"]) for line in lines if line["kind"] == "final"},
        progress={(line["done"], tuple(line["epoch_ends"])) for line in lines if line["kind"] == "final"},
    )


def check_identical(lines: list[dict[str, Any]]) -> None:
    """All ranks of a generation begin it with the same bits."""
    by_generation: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
    for line in lines:
        if line["kind"] == "state":
            by_generation[line["generation"], line["step"]].add(str(line["hash"]))
    differing = {key: hashes for key, hashes in by_generation.items() if len(hashes) > 1}
    assert not differing, f"ranks differ at (generation, step): {differing}"
