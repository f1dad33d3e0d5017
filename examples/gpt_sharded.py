"""A small GPT whose parameters are sharded over workers that come, go and die while it trains.

No worker holds the whole model: `elastic_ray.fully_shard` is torch's `fully_shard` (FSDP2) in a group that may change.
The job begins with two workers, grows to four, shrinks to three, and one of them is killed with SIGKILL; no checkpoint
is read. The loss on held-out text is that of a run with one worker to which nothing happens. At its end the job saves
the weights, which plain torch loads. The text is made here.
Takes one to two minutes on two cores:

    python examples/gpt_sharded.py
    python examples/gpt_sharded.py --smoke     a smaller model, fewer steps
    python examples/gpt_sharded.py --meta      no worker ever builds the whole model, not even at the start
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
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import elastic_ray as er

LENGTH, BATCH = 32, 24
EPOCHS, SMOKE_EPOCHS = 12, 6
SAMPLES, SMOKE_SAMPLES = 960, 480  # excerpts of the text in an epoch
SIZE = {"width": 128, "layers": 4, "heads": 4}
SMOKE_SIZE = {"width": 32, "layers": 2, "heads": 2}
PAUSE_S = 0.5  # in each step, until all has happened that is to happen: workers take seconds to start
CLOSE = 2e-3
TIME_LIMIT_S = 900.0  # a busy machine takes several times as long

WORDS = ("the", "cat", "dog", "sees", "likes", "a", "red", "small", "house", "tree", "and", "runs", "to", "under")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.inputs(x).chunk(3, -1)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outputs(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norms = Attention(width, heads), nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Bytes in, logits of the byte that follows each out."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, length, 128) of ``text`` (batch, length)."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


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
    """The train function: a plain loop, and two lines that shard the model."""
    torch.manual_seed(0)
    where = {"device": "cpu"} if config["meta"] else {}
    with torch.device("meta") if config["meta"] else contextlib.nullcontext():
        gpt: Any = GPT(**config["size"])
    for block in gpt.blocks:
        er.fully_shard(block, **where)
    er.fully_shard(gpt, **where)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3, eps=1e-4)
    model = er.AdaptiveDataParallel(gpt, optimizer)
    loader = er.AdaptiveDataLoader(excerpts(config["samples"], 1), batch_size=BATCH)
    held_out = er.AdaptiveDataLoader(excerpts(96, 2), batch_size=BATCH)
    for _ in er.remaining_epochs_until(config["epochs"]):
        totals = er.Accumulator()
        for (text,) in loader:
            optimizer.zero_grad()
            loss_of(model, text).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if config["until"] and not Path(config["until"]).exists():
                time.sleep(PAUSE_S)
        for (text,) in held_out:
            with torch.no_grad():
                totals["held out"] += loss_of(model, text).item() * len(text) / 96
        er.report({"held_out": totals["held out"]})
    weights = gpt.state_dict()  # all ranks ask: of a model on meta rank 0 has the whole only then
    if er.get_context().get_world_rank() == 0:
        torch.save(weights, config["weights"])


def plain_loss(config: dict[str, Any]) -> float:
    """The loss on held-out text of a model that is not sharded and has loaded what a job has saved."""
    model = GPT(**config["size"])
    model.load_state_dict(torch.load(config["weights"]))
    with torch.no_grad():
        return loss_of(model, excerpts(96, 2).tensors[0]).item()


class Demo:
    """A job to which things happen, and one to which nothing does."""

    def __init__(self, directory: str, *, smoke: bool, meta: bool) -> None:
        self._directory, self._meta = directory, meta
        self._config = {
            "size": SMOKE_SIZE if smoke else SIZE,
            "samples": SMOKE_SAMPLES if smoke else SAMPLES,
            "epochs": SMOKE_EPOCHS if smoke else EPOCHS,
        }
        self._start_s = time.monotonic()
        self._seen = self._reported = 0

    def _weights(self, name: str) -> str:
        """The file that a job saves its weights in."""
        return str(Path(self._directory, f"{name}.pt"))

    def saved_loss(self, name: str) -> float:
        """The loss of a plain model that has loaded a job's weights."""
        return plain_loss({**self._config, "weights": self._weights(name)})

    def submit(self, name: str, workers: tuple[int, int], until: str = "", *, meta: bool = False) -> er.JobHandle:
        """Begin a job."""
        self._seen = self._reported = 0
        return er.ElasticTrainer(
            train,
            train_loop_config={**self._config, "until": until, "meta": meta, "weights": self._weights(name)},
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(name=name, storage_path=self._directory),
            elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0),  # on two cores, workers may be slow to answer
        ).submit()

    def disturbed(self) -> list[float]:
        """The losses of the job that is resized and loses a worker."""
        until = Path(self._directory, "all has happened")
        handle = self.submit("sharded", (1, 4), str(until), meta=self._meta)
        for workers in (2, 4, 3):
            handle.resize(workers)
            self.wait(handle, workers)
        victim = handle.workers()[-1]
        self.say(f"--- kill -9 {victim.pid} (rank {victim.rank} of 3) ---")
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        self.wait(handle, 3, without=victim.pid)
        until.touch()
        return self.losses(handle)

    def undisturbed(self) -> list[float]:
        """The losses of one worker, to which nothing happens."""
        return self.losses(self.submit("undisturbed", (1, 1)))

    def wait(self, handle: er.JobHandle, workers: int, without: int = 0) -> None:
        """Wait until ``workers`` workers train, none of which is the process ``without``, which was killed."""
        while True:
            self.poll(handle)
            members = handle.workers()
            if len(members) == workers and all(each.pid != without for each in members):
                return
            if handle.done():
                raise RuntimeError(f"the job had ended before {workers} workers trained")
            time.sleep(0.2)

    def losses(self, handle: er.JobHandle) -> list[float]:
        """Wait for the job's end."""
        found: list[float] = []
        while True:
            self.poll(handle)
            while (report := handle.next_report(self._reported, timeout=0.0)) is not None:
                self._reported = report.index
                found.append(report.metrics["held_out"])
                self.say(f"epoch {report.index}: loss {found[-1]:.4f} on held-out text, {report.workers} workers")
            if handle.done():
                handle.result()
                return found
            time.sleep(0.2)

    def poll(self, handle: er.JobHandle) -> None:
        """Show what is new."""
        for event in handle.events(since=self._seen):
            self._seen += 1
            changed = event.from_workers != event.to_workers
            sizes = f"{event.from_workers} -> {event.to_workers} workers: " if changed else ""
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
    ray.init(address="local", num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory(prefix="elastic-ray-gpt-") as directory:
        try:
            demo = Demo(directory, smoke=arguments.smoke, meta=arguments.meta)
            disturbed, undisturbed = demo.disturbed(), demo.undisturbed()
            saved = demo.saved_loss("sharded")
        finally:
            ray.shutdown()
    same = abs(disturbed[-1] - undisturbed[-1]) < CLOSE
    verdict = "the same" if same else "not the same"
    show(f"\nloss on held-out text: {disturbed[-1]:.5f}; undisturbed {undisturbed[-1]:.5f}: {verdict}")
    show(f"of a plain model with the weights that were saved: {saved:.5f}")
    return 0 if same and disturbed[-1] < disturbed[0] and abs(saved - disturbed[-1]) < CLOSE else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a smaller model, fewer steps")
    parser.add_argument("--meta", action="store_true", help="build the disturbed job's model on torch's meta device")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(options)
    sys.exit(code)
