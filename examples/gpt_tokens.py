"""A small GPT whose batch is in tokens: the decay of its learning rate becomes a batch, and workers follow the batch.

Two jobs train the same model for the same number of tokens of real text, the sources and docstrings of Python's
standard library. One has a fixed batch and a cosine whose highest rate was tuned for it. The other has the same cosine
as `schedule="seesaw"`: where it would multiply the rate by a, the rate is multiplied by sqrt(a) and the batch by 1 / a,
up to the cap. A policy asks for a worker more with each multiple of the first batch, from one to four. The losses on
held-out text are nearly the same; the serial steps are fewer, and that is the time on a cluster which has the workers.
Takes some ten minutes on two cores; the last line is JSON:

    python examples/gpt_tokens.py
    python examples/gpt_tokens.py --smoke     a smaller model, fewer tokens
    python examples/gpt_tokens.py --tune      which highest rate is best for the fixed batch
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in workers

import ray
import ray.train
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyView, Resize

LENGTH = 64  # tokens of a row; a token is a byte
BATCH_TOKENS, MAX_BATCH_TOKENS = 8 * LENGTH, 64 * LENGTH
MOST_WORKERS = 4
FULL = {"tokens": 1 << 21, "width": 128, "layers": 4, "rate": 3e-3, "seeds": 3}
SMOKE = {"tokens": 1 << 18, "width": 48, "layers": 2, "rate": 3e-3, "seeds": 1}
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
WARM_UP = 0.05
CLOSE, FEWER = 0.02, 0.25
WAIT_S = 2.0  # in each step, while a worker that was asked for starts: here that takes as long as hundreds of steps


class WorkersFollowBatch(Policy):
    """One worker for each multiple of the first batch."""

    def __init__(self) -> None:
        self.asked = 1

    def before_train(self, view: PolicyView) -> Resize:
        """Begin alone."""
        return Resize(to=1)

    def after_step(self, view: PolicyView) -> Resize | None:
        """Ask for as many as the batch has work for."""
        wanted = workers_for(view.batch_size / view.initial_batch_size)
        if wanted <= self.asked:
            return None
        self.asked = wanted
        return Resize(to=wanted)


def workers_for(scale: float) -> int:
    """Workers for a batch of so many first ones."""
    return max(1, min(MOST_WORKERS, int(scale)))


class GPT(nn.Module):
    """Bytes in, logits of the byte that follows each out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, length, 128) of ``text`` (batch, length)."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.bytes(text) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def text_of(tokens: int) -> tuple[Tensor, Tensor]:
    """Rows of (LENGTH + 1) bytes of Python's standard library to train on, and some of other modules."""
    library = Path(sysconfig.get_path("stdlib"))
    rows = tokens // LENGTH
    found, held_out = bytearray(), bytearray()
    for number, path in enumerate(sorted(library.glob("*.py"))):
        (held_out if number % 10 == 0 else found).extend(byte for byte in path.read_bytes() if byte < 128)
    each = LENGTH + 1
    whole = torch.frombuffer(found, dtype=torch.uint8)
    order = torch.randperm(len(whole) // each, generator=torch.Generator().manual_seed(0))[:rows]
    if len(order) < rows:
        raise RuntimeError(f"the standard library has {len(order)} rows of text, but {rows} are wanted")
    other = torch.frombuffer(held_out, dtype=torch.uint8)
    return whole[: len(whole) // each * each].view(-1, each)[order].long(), other[: 256 * each].view(-1, each).long()


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Mean over all tokens."""
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train(config: dict[str, Any]) -> dict[str, Any]:
    """The train function: a plain loop."""
    torch.manual_seed(config["seed"])
    rows, held_out = text_of(config["tokens"])
    gpt = GPT(config["width"], config["layers"])
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=config["rate"], betas=(0.9, 0.98), weight_decay=0.1)
    planned = len(rows) * LENGTH // BATCH_TOKENS
    warm = max(1, int(WARM_UP * planned))
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(1.0, step / planned)))),
    )
    grows = config["schedule"] == "seesaw"
    model = er.AdaptiveDataParallel(
        gpt,
        optimizer,
        cosine,
        schedule=config["schedule"],
        policy=WorkersFollowBatch() if grows else None,
    )
    loader = er.AdaptiveDataLoader(
        torch.utils.data.TensorDataset(rows),
        batch_tokens=BATCH_TOKENS,
        tokens_per_sample=LENGTH,
        max_batch_tokens=MAX_BATCH_TOKENS if grows else None,
        seed=config["seed"],
    )
    context, begin_s, most, largest = er.get_context(), time.perf_counter(), 1, BATCH_TOKENS
    for _ in er.remaining_epochs_until(1):
        for (text,) in loader:
            optimizer.zero_grad()
            loss_of(model, text).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            cosine.step()
            largest = max(largest, loader.current_batch_size * LENGTH)
            most = max(most, context.get_world_size())
            if config["waits"] and workers_for(largest / BATCH_TOKENS) > context.get_world_size():
                time.sleep(WAIT_S)
        with torch.no_grad():
            loss = sum(loss_of(gpt, part).item() for part in held_out.split(32)) / (len(held_out) / 32)
        result = {
            "loss": loss,
            "steps": context.get_global_step(),
            "tokens": len(rows) * LENGTH,
            "largest": largest,
            "workers": most,
            "seconds": time.perf_counter() - begin_s,
        }
        er.report(result)
    return result


def run_job(name: str, directory: str, config: dict[str, Any], most: int) -> dict[str, Any]:
    """Run a job; returns what it reports at its end."""
    result = er.ElasticTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=(1, most) if most > 1 else 1),
        run_config=ray.train.RunConfig(name=name, storage_path=directory),
        elastic_config=er.ElasticConfig(heartbeat_timeout_s=20.0),  # on two cores, workers may be slow to answer
    ).fit()
    assert result.metrics is not None, "it reports once"
    return dict(result.metrics)


def compare(size: dict[str, Any], directory: str) -> list[dict[str, Any]]:
    """Both jobs for each seed."""
    found = []
    for seed in range(size["seeds"]):
        config = {**size, "seed": seed}
        fixed = run_job(f"fixed-{seed}", directory, {**config, "schedule": "progress", "waits": False}, 1)
        seesaw = run_job(f"seesaw-{seed}", directory, {**config, "schedule": "seesaw", "waits": True}, MOST_WORKERS)
        for name, each in (("cosine, fixed batch", fixed), ("seesaw", seesaw)):
            found.append({"run": name, "seed": seed, **each})
    return found


def show(runs: list[dict[str, Any]]) -> bool:
    """Print the table and the JSON line; whether Seesaw is as good with fewer steps."""
    print(f"\n{'run':<20} {'seed':>4} {'batch, tokens':>16} {'workers':>8} {'steps':>6} {'loss':>7}")
    for each in runs:
        batch = f"{BATCH_TOKENS} -> {each['largest']}" if each["largest"] > BATCH_TOKENS else f"{BATCH_TOKENS}"
        print(
            f"{each['run']:<20} {each['seed']:>4} {batch:>16} {each['workers']:>8} {each['steps']:>6} "
            f"{each['loss']:>7.4f}"
        )
    fixed, seesaw = runs[::2], runs[1::2]
    loss = sum(each["loss"] for each in seesaw) / sum(each["loss"] for each in fixed)
    steps = sum(each["steps"] for each in seesaw) / sum(each["steps"] for each in fixed)
    good = bool(loss < 1 + CLOSE and steps < 1 - FEWER)
    print(f"loss {loss:.4f} x with {steps:.2f} x the serial steps; good enough: {'yes' if good else 'no'}")
    print(json.dumps({"loss_ratio": round(loss, 5), "steps_ratio": round(steps, 4), "runs": runs}))
    return good


def main(arguments: argparse.Namespace) -> int:
    """The comparison, or the search for a rate."""
    size = SMOKE if arguments.smoke else FULL
    if arguments.tune:
        for rate in RATES:
            found = train({**size, "rate": rate, "seed": 100, "schedule": "progress", "waits": False})
            print(f"rate {rate:g}: loss {found['loss']:.4f}", flush=True)
        return 0
    ray.init(address="local", num_cpus=MOST_WORKERS, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="elastic-ray-gpt-") as directory:
        try:
            runs = compare(size, directory)
        finally:
            ray.shutdown()
    return 0 if show(runs) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a smaller model, fewer tokens")
    parser.add_argument("--tune", action="store_true", help="try highest rates for the fixed batch")
    sys.exit(main(parser.parse_args()))
