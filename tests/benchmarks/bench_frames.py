"""Python frames and torch's operations of one step beside DDP's: what it does, whatever the machine.

    python tests/benchmarks/bench_frames.py

Counts calls of Python functions in the thread that trains (``sys.setprofile``), from one batch to the next: loader,
forward, backward, reduction, update, edge. Those of the model, of the optimizer and of torch's own wrappers around them
are on both sides; the table has the frames of this package. Then torch's operations that a step dispatches (a GPU's
launches), beside those under DDP; and the files of this package that a worker passes when its group changes: from the
end of the step's body to the next batch where another worker joins, and from the backward pass where one is killed.
Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from common import bar, finish

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.sync import AllReduce
from tests.loop import counted
from tests.loop.changing import Change, Kill, run_job
from tests.loop.counted import BATCH, COUNTED, SKIPPED, net

PACKAGE = str(Path(er.__file__).parent) + "/"
CHANGED_IN = 22


class Frames:
    """Calls of Python functions of one thread, by file and function, over some steps."""

    def __init__(self) -> None:
        self.calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self.steps = 0

    def step(self, number: int) -> None:
        """Step ``number`` of the thread's loop begins: count from the first that is not skipped on."""
        if number == SKIPPED:
            sys.setprofile(self._profile)
        elif number == SKIPPED + COUNTED:
            sys.setprofile(None)
        if SKIPPED <= number < SKIPPED + COUNTED:
            self.steps += 1

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_name in ("moment", "at", "step"):  # scripted faults, which only tests have; and this count
                return
            self.calls[code.co_filename, f"{code.co_qualname}"] += 1

    def ours(self) -> dict[tuple[str, str], float]:
        """Frames a step of this package, by file and function."""
        kept = {key: count for key, count in self.calls.items() if key[0].startswith(PACKAGE)}
        return {(file.removeprefix(PACKAGE), name): count / self.steps for (file, name), count in kept.items()}

    @property
    def total(self) -> float:
        """Frames a step, of whatever package."""
        return sum(self.calls.values()) / self.steps


def measure(world_size: int, layers: int, *, bucket_bytes: int = 25 << 20) -> Frames:
    """Frames of rank 0 in a job of this size."""
    found: list[Frames] = []
    strategy = AllReduce(bucket_bytes=bucket_bytes)

    def train() -> None:
        torch.manual_seed(0)
        module = net(layers)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = er.AdaptiveDataParallel(module, optimizer, strategy=strategy)
        data = torch.utils.data.TensorDataset(torch.randn((SKIPPED + COUNTED + 4) * BATCH, 8))
        loader = er.AdaptiveDataLoader(data, batch_size=BATCH)
        frames, steps, first = Frames(), 0, current_session().worker == "w1"
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                if first:
                    frames.step(steps)
                steps += 1
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        if first:
            found.append(frames)

    run_job(train, first=range(1, world_size + 1))
    return found[0]


def plain(layers: int) -> Frames:
    """The same loop with plain PyTorch and its DataLoader."""
    module = net(layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn((SKIPPED + COUNTED + 4) * BATCH, 8))
    frames = Frames()
    for step, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=BATCH)):
        frames.step(step)
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return frames


def under_ddp(layers: int) -> float:
    """Torch's operations of a step under DDP, in a group of one, which reduces all the same."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            return counted.plain(layers, torch.nn.parallel.DistributedDataParallel).of_a_step
        finally:
            torch.distributed.destroy_process_group()


def files_of_change(script: Sequence[Change | Kill], first: Sequence[int], *, from_backward: bool) -> set[str]:
    """Files of this package that the first worker passes in the change of its group that ``script`` makes."""
    found: set[str] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    def train() -> None:
        torch.manual_seed(0)
        module = net(2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = er.AdaptiveDataParallel(module, optimizer)
        data = torch.utils.data.TensorDataset(torch.randn((CHANGED_IN + 8) * BATCH, 8))
        watched, step = current_session().worker == "w1", 0
        for _ in er.remaining_epochs_until(1):
            for (x,) in er.AdaptiveDataLoader(data, batch_size=BATCH):
                sys.setprofile(None)
                step += 1
                optimizer.zero_grad()
                loss = model(x).square().mean()
                if watched and step == CHANGED_IN and from_backward:
                    sys.setprofile(profile)
                loss.backward()
                optimizer.step()
                if watched and step == CHANGED_IN and not from_backward:
                    sys.setprofile(profile)

    run_job(train, script, first=first)
    return found


def in_thread(function: Callable[[], Frames]) -> Frames:
    """Run it in a thread of its own, so that nothing else is profiled."""
    result: list[Frames] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


BARS = (
    ("frames_2", "Python frames of a step of two ranks, net of two layers, plain all-reduce", 250),
    ("frames_1", "Python frames of a step of one rank", 180),
    ("per_parameter_2", "Python frames for each further parameter", 1),
    ("per_bucket", "Python frames for each further bucket of two ranks", 10),
    ("files_2", "files that a step passes", 25),
    ("rooms_2", "packages that a step passes", 9),
    ("files_join", "files that a survivor passes when another worker joins", 35),
    ("files_kill", "files that a survivor passes when another worker is killed", 35),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=0, help="print as many of the most frequent functions")
    options = parser.parse_args()
    row: dict[str, float] = {}
    print(f"{'':<12} {'frames':>8} {'files':>6} {'rooms':>6} {'all':>8} {'plain':>8}")
    for world_size in (2, 1):
        frames = measure(world_size, 2)
        ours = frames.ours()
        files = {file for file, _ in ours}
        rooms = {file.split("/")[0] for file in files}
        own = sum(ours.values())
        base = in_thread(lambda: plain(2)).total
        print(
            f"{world_size} rank(s)    {own:>8.1f} {len(files):>6} {len(rooms):>6} {frames.total:>8.1f} {base:>8.1f}",
            flush=True,
        )
        row |= {f"frames_{world_size}": own, f"files_{world_size}": len(files), f"rooms_{world_size}": len(rooms)}
        if options.top:
            for (file, name), count in sorted(frames.calls.items(), key=lambda item: -item[1])[: options.top]:
                print(f"    {count / frames.steps:>6.1f}  {file.removeprefix(PACKAGE)}  {name}")
        more = sum(measure(world_size, 12).ours().values())
        row[f"per_parameter_{world_size}"] = (more - own) / 20
        print(f"             {row[f'per_parameter_{world_size}']:>8.2f} frames for each further parameter", flush=True)
        if world_size > 1:
            many, one = (measure(world_size, 48, bucket_bytes=size) for size in (1024, 25 << 20))
            further = sum(many.ours().values()) - sum(one.ours().values())
            launched = ("sync/engine/reduction.py", "Reduction.launch")
            row["per_bucket"] = further / (many.ours()[launched] - one.ours()[launched])
            print(f"             {row['per_bucket']:>8.2f} frames for each further bucket", flush=True)
    for layers in (2, 12):
        row[f"operations_ddp_{layers}"] = theirs = under_ddp(layers)
        for world_size in (1, 2):
            row[f"operations_{world_size}_{layers}"] = own = counted.ours(world_size, layers).of_a_step
            print(f"{own:>8.2f} operations of torch on {world_size} rank(s), {layers} layers; under DDP {theirs:.2f}")
    join = [Change(step=CHANGED_IN - 1, workers=(1, 2, 3))]
    kill = [Kill(CHANGED_IN - 1, 2, "backward", after=(1,))]
    row["files_join"] = len(files_of_change(join, (1, 2), from_backward=False))
    row["files_kill"] = len(files_of_change(kill, (1, 2), from_backward=True))
    print(f"{row['files_join']:>8.0f} files of a survivor's resize, {row['files_kill']:.0f} of a kill")
    finish(
        "frames",
        rows=[row],
        bars=[bar(claim, value=row[key], limit=limit, at_least=False) for key, claim, limit in BARS],
    )


if __name__ == "__main__":
    main()
