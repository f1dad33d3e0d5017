"""A small Llama-like model, parallel over two workers, that is trained by units which come, go and die.

A unit is two workers that live and die together. Inside it `torch.distributed` is an ordinary group of two, in which
torch's own `parallelize_module` divides the layers (tensor parallelism, DTensor), unchanged. Across units gradients of
the same position are averaged, and the job grows from two units to three, shrinks to two, and loses one when a worker
of it gets SIGKILL; no checkpoint is read. The loss is that of a single worker that holds the whole model and to which
nothing happens. The text is made here. Takes one to three minutes on two cores:

    python examples/llama_units.py
    python examples/llama_units.py --smoke     a smaller model, fewer steps
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# One thread per worker, for several of them share two cores; read when torch is imported, here and in workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import ray.train
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import elastic_ray as er

LENGTH, BATCH = 32, 12
EPOCHS, SMOKE_EPOCHS = 12, 6
SAMPLES, SMOKE_SAMPLES = 480, 240  # excerpts of the text in an epoch
SIZE = {"width": 64, "layers": 4, "heads": 4}
SMOKE_SIZE = {"width": 32, "layers": 2, "heads": 2}
PAUSE_S = 0.5  # in each step, until all has happened that is to happen: workers take seconds to start
CLOSE = 2e-3
TIME_LIMIT_S = 900.0  # a busy machine takes several times as long

WORDS = ("the", "cat", "dog", "sees", "likes", "a", "red", "small", "house", "tree", "and", "runs", "to", "under")


class Attention(nn.Module):
    """Causal self-attention, of as many heads as this worker has columns for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            each(x).view(batch, length, -1, self.head).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norms = Attention(width, heads), nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Bytes in, logits of the byte that follows each out."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 128, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, length, 128) of ``text`` (batch, length)."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def parallelize(model: Llama) -> None:
    """Divide the layers over the unit's workers, by torch's own means."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ("attention.q", "attention.k", "attention.v", "gate", "up"), ("attention.o", "down")
    plan: Any = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    for block in model.blocks:
        parallelize_module(block, er.unit_mesh()["tp"], plan)


def excerpts(samples: int, seed: int) -> torch.utils.data.TensorDataset:
    """Parts of a made text, (LENGTH + 1) bytes each."""
    generator = torch.Generator().manual_seed(seed)
    words = [WORDS[i] for i in torch.randint(len(WORDS), (20_000,), generator=generator).tolist()]
    text = torch.tensor(list(" ".join(words).encode()))
    starts = torch.randint(len(text) - LENGTH - 1, (samples, 1), generator=generator)
    return torch.utils.data.TensorDataset(text[starts + torch.arange(LENGTH + 1)])


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Mean over all bytes."""
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train(config: dict[str, Any]) -> None:
    """The train function: a plain loop, and one line that divides the model."""
    torch.manual_seed(0)
    llama = Llama(**config["size"])
    if config["parallel"]:
        parallelize(llama)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=2e-3, eps=1e-4, foreach=False)
    model = er.AdaptiveDataParallel(llama, optimizer)
    loader = er.AdaptiveDataLoader(excerpts(config["samples"], 1), batch_size=BATCH)
    held_out = er.AdaptiveDataLoader(excerpts(96, 2), batch_size=BATCH)
    for _ in er.remaining_epochs_until(config["epochs"]):
        totals = er.Accumulator()
        for (text,) in loader:
            optimizer.zero_grad()
            loss_of(model, text).backward()
            optimizer.step()
            if config["until"] and not Path(config["until"]).exists():
                time.sleep(PAUSE_S)
        for (text,) in held_out:
            with torch.no_grad():
                totals["held out"] += loss_of(model, text).item() * len(text) / 96
        er.report({"held_out": totals["held out"]})


class Demo:
    """A job to whose units things happen, and one to which nothing does."""

    def __init__(self, directory: str, *, smoke: bool) -> None:
        self._directory = directory
        self._config = {
            "size": SMOKE_SIZE if smoke else SIZE,
            "samples": SMOKE_SAMPLES if smoke else SAMPLES,
            "epochs": SMOKE_EPOCHS if smoke else EPOCHS,
        }
        self._start_s = time.monotonic()
        self._seen = self._reported = 0

    def submit(self, name: str, workers: int | tuple[int, int], unit: int | er.Unit, until: str = "") -> er.JobHandle:
        """Begin a job."""
        self._seen = self._reported = 0
        return er.ElasticTrainer(
            train,
            train_loop_config={**self._config, "until": until, "parallel": unit != 1},
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(name=name, storage_path=self._directory),
            elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0, join_timeout_s=300.0),  # two cores may be slow
            scheduling_config=er.SchedulingConfig(unit=unit),
        ).submit()

    def disturbed(self) -> list[float]:
        """The losses of the job whose units come and go."""
        until = Path(self._directory, "all has happened")
        handle = self.submit("units", (2, 6), er.Unit(tp=2), str(until))
        for units in (2, 3, 2):
            handle.resize(units)
            self.wait(handle, units)
        victim = handle.workers()[-1]
        self.say(f"--- kill -9 {victim.pid} (a worker of unit {victim.rank} of 2) ---")
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        self.wait(handle, 2, without=victim.pid)
        until.touch()
        return self.losses(handle)

    def undisturbed(self) -> list[float]:
        """The losses of one worker with the whole model, to which nothing happens."""
        return self.losses(self.submit("undisturbed", 1, 1))

    def wait(self, handle: er.JobHandle, units: int, without: int = 0) -> None:
        """Wait until so many units train, and one that lost a worker is not among them."""
        while True:
            self.poll(handle)
            members = handle.workers()
            if len(members) == units and all(each.pid != without for each in members):
                return
            if handle.done():
                raise RuntimeError(f"the job had ended before {units} units trained: {handle.status().message}")
            time.sleep(0.2)

    def losses(self, handle: er.JobHandle) -> list[float]:
        """Wait for the job's end."""
        found: list[float] = []
        while True:
            self.poll(handle)
            while (report := handle.next_report(self._reported, timeout=0.0)) is not None:
                self._reported = report.index
                found.append(report.metrics["held_out"])
                self.say(f"epoch {report.index}: loss {found[-1]:.4f} on held-out text, {report.workers} units")
            if handle.done():
                handle.result()
                return found
            time.sleep(0.2)

    def poll(self, handle: er.JobHandle) -> None:
        """Show what is new."""
        for event in handle.events(since=self._seen):
            self._seen += 1
            changed = event.from_workers != event.to_workers
            sizes = f"{event.from_workers} -> {event.to_workers} units: " if changed else ""
            self.say(f"{event.kind.value:<9} {sizes}{event.reason}")
        if time.monotonic() - self._start_s > TIME_LIMIT_S:
            raise TimeoutError(f"the jobs have not ended within {TIME_LIMIT_S:g} s")

    def say(self, text: str) -> None:
        """One line of the log."""
        show(f"{time.monotonic() - self._start_s:6.1f} s  {text}")


def show(line: str) -> None:
    """Print a line. Standard output itself is redirected, for Ray fills it with a paragraph on the killed worker."""
    print(line, file=sys.__stdout__, flush=True)


def main(arguments: argparse.Namespace) -> int:
    """Both jobs; 0 when they have come to the same loss."""
    ray.init(address="local", num_cpus=7, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory(prefix="elastic-ray-llama-") as directory:
        try:
            demo = Demo(directory, smoke=arguments.smoke)
            disturbed, undisturbed = demo.disturbed(), demo.undisturbed()
        finally:
            ray.shutdown()
    same = abs(disturbed[-1] - undisturbed[-1]) < CLOSE
    verdict = "the same" if same else "not the same"
    show(f"\nloss on held-out text: {disturbed[-1]:.5f}; undisturbed {undisturbed[-1]:.5f}: {verdict}")
    return 0 if same and disturbed[-1] < disturbed[0] else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a smaller model, fewer steps")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(options)
    sys.exit(code)
