"""Seesaw beside a tuned cosine at a fixed batch: held-out loss and serial steps of a GPT at equal tokens.

A byte-level GPT trains on the Python sources of torch, every 20th file of which is held out. One process, no Ray. First
the fixed batch tries highest rates, twice and half as high, for a quarter of the tokens, until the best lies between
worse ones. Then for each seed: AdamW with a cosine to 0 at the fixed batch, and the same as ``schedule="seesaw"``,
whose batch may grow to ``--cap`` times the first one. Both have the same rate, rows and initial weights.

Before that a few steps are timed: a run has as many tokens as fit ``--minutes``, all runs and the search together, and
each row of text is used at most once.

Two forms: ``small`` (1.1 M parameters, batches of 512 tokens) and ``large`` (11 M, 8192 tokens; bf16 on a GPU).

    python tests/benchmarks/bench_seesaw.py --minutes 15                                small, on a CPU
    python tests/benchmarks/bench_seesaw.py --device cuda --form large --minutes 5      on a GPU
        [--seeds 3] [--cap 4] [--rate 1e-3 (no search)]

Bars: mean loss at most 0.5 % above that of the fixed batch, with at most 0.7 x its steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

from common import bar, finish, side_parser

WARM_UP = 0.05
TIMED_STEPS, UNTIMED_STEPS = 20, 10
SEARCH, TRIALS = 0.25, 4  # part of the tokens of a run; runs that are expected in the search
LEAST_STEPS = 64
HELD_OUT_FILES, HELD_OUT_TOKENS = 20, 1 << 19


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What is trained.

    Attributes:
        length: of a row [bytes].
        batch: of the fixed side [rows].
        rate: highest one that is tried first.
        held_out: rows of the final loss.
    """

    width: int
    layers: int
    heads: int
    length: int
    batch: int
    rate: float
    held_out: int


FORMS = {
    "small": Form(width=128, layers=5, heads=4, length=64, batch=8, rate=3e-3, held_out=2048),
    "large": Form(width=384, layers=6, heads=6, length=256, batch=32, rate=1e-3, held_out=4096),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A form with its text, on its device."""

    form: Form
    device: str
    rows: Any
    held_out: Any


def prepare(form: Form, device: str) -> Task:
    """Read the sources of torch."""
    import torch

    each = form.length + 1
    found = bytearray(), bytearray()
    for number, path in enumerate(sorted(Path(torch.__file__).parent.rglob("*.py"))):
        found[number % HELD_OUT_FILES == 0].extend(path.read_bytes())
    rows, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in found)
    rows, held_out = (part[: len(part) // each * each].view(-1, each) for part in (rows, held_out))
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))[: form.held_out]
    return Task(form=form, device=device, rows=rows.to(device), held_out=held_out[order].to(device))


def gpt(form: Form) -> Any:
    """Bytes in, logits of the bytes that follow out."""
    from torch import nn

    functional = nn.functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(form.width), nn.LayerNorm(form.width)
            self.qkv, self.out = nn.Linear(form.width, 3 * form.width), nn.Linear(form.width, form.width)
            self.up, self.down = nn.Linear(form.width, 4 * form.width), nn.Linear(4 * form.width, form.width)

        def forward(self, x: Any) -> Any:
            parts = self.qkv(self.before(x)).unflatten(-1, (3, form.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.between(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bytes, self.places = nn.Embedding(256, form.width), nn.Embedding(form.length, form.width)
            self.blocks = nn.Sequential(*(Block() for _ in range(form.layers)))
            self.norm, self.head = nn.LayerNorm(form.width), nn.Linear(form.width, 256, bias=False)
            for each in self.modules():
                if isinstance(each, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(each.weight, std=0.02)
            for block in self.blocks:
                for layer in (block.out, block.down):
                    nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * form.layers))

        def forward(self, text: Any) -> Any:
            return self.head(self.norm(self.blocks(self.bytes(text) + self.places.weight[: text.shape[1]])))

    return Gpt()


def train(task: Task, rate: float, seed: int, planned: int, cap: int = 1, limit: int = 0) -> dict[str, Any]:
    """Train for the tokens of ``planned`` steps at the fixed batch; ``cap`` 1 keeps it, ``limit`` stops early."""
    import torch

    import elastic_ray as er
    from elastic_ray.run.current import set_session

    set_session(None)
    torch.manual_seed(seed)
    form, device = task.form, task.device
    model = gpt(form).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, round(WARM_UP * planned))
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(1.0, step / planned))))
    )
    wrapped = er.AdaptiveDataParallel(model, optimizer, cosine, schedule="seesaw" if cap > 1 else "progress")
    order = torch.randperm(len(task.rows), generator=torch.Generator().manual_seed(seed))[: planned * form.batch]
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(order), batch_size=form.batch, shuffle=False)
    if cap > 1:
        loader.autoscale_batch_size(max_batch_size=cap * form.batch)
    sizes, begin_s = list[int](), 0.0
    for _ in er.remaining_epochs_until(1):
        for (which,) in loader:
            if len(sizes) == UNTIMED_STEPS:
                begin_s = now(device)
            optimizer.zero_grad()
            loss_of(wrapped, task, task.rows[which.to(device)]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            cosine.step()
            sizes.append(len(which))
            if len(sizes) == limit:
                break
    seconds = now(device) - begin_s
    with torch.no_grad():
        loss = statistics.fmean(float(loss_of(model, task, part)) for part in task.held_out.split(64))
    changes = [(size, len(list(each))) for size, each in itertools.groupby(sizes)]
    return {
        "loss": loss,
        "steps": len(sizes),
        "tokens": sum(sizes) * form.length,
        "largest batch": max(sizes),
        "seconds": seconds * len(sizes) / max(1, len(sizes) - UNTIMED_STEPS),
        "batches": " ".join(f"{size}x{count}" for size, count in changes),
    }


def loss_of(model: Any, task: Task, rows: Any) -> Any:
    """Mean over all bytes."""
    import torch

    text = rows.long()
    with torch.autocast(task.device, dtype=torch.bfloat16, enabled=task.device == "cuda"):
        logits = model(text[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def now(device: str) -> float:
    """Time once the device has done all [s]."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def affordable(task: Task, minutes: float, seeds: int, *, searches: bool) -> int:
    """Steps of a run at the fixed batch, so that all runs fit the time and the text."""
    timed = train(task, task.form.rate, 0, LEAST_STEPS, limit=UNTIMED_STEPS + TIMED_STEPS)
    step_s = timed["seconds"] / timed["steps"]
    runs = 2 * seeds + SEARCH * TRIALS * searches
    steps = int(0.9 * 60 * minutes / (runs * step_s))
    found = min(steps, len(task.rows) // task.form.batch)
    if found < LEAST_STEPS:
        raise SystemExit(
            f"a step takes {step_s:.2f} s, so {minutes:g} minutes hold {found} steps a run, fewer than {LEAST_STEPS}: "
            "give more --minutes or fewer --seeds"
        )
    print(f"a step takes {1e3 * step_s:.1f} ms: {found} steps a run at the fixed batch", flush=True)
    return found


def tuned(task: Task, planned: int) -> float:
    """Return the highest rate with the lowest loss among powers of 2 around the form's."""

    def loss(rate: float) -> float:
        value: float = train(task, rate, 100, max(LEAST_STEPS // 2, int(SEARCH * planned)))["loss"]
        print(f"rate {rate:g}: loss {value:.4f}", flush=True)
        return value

    losses = {rate: loss(rate) for rate in (task.form.rate, 2 * task.form.rate)}
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)) and len(losses) < 6:
        rate = best / 2 if best == min(losses) else 2 * best
        losses[rate] = loss(rate)
    return best


def main() -> None:
    """Command line."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--form", choices=FORMS, default="small")
    parser.add_argument("--minutes", type=float, default=15.0, help="of all runs together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cap", type=int, default=4, help="largest batch, in first ones")
    parser.add_argument("--rate", type=float, default=None, help="highest rate; found first if left out")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    options = parser.parse_args()
    if options.minutes <= 0 or options.seeds < 1 or options.cap < 2:
        parser.error("needs --minutes above 0, --seeds of 1 or more and --cap of 2 or more")
    import torch

    torch.set_num_threads(options.threads)
    task = prepare(FORMS[options.form], options.device)
    seeds, minutes = (1, 0.5) if options.quick else (options.seeds, options.minutes)
    planned = affordable(task, minutes, seeds, searches=options.rate is None)
    rate = options.rate or tuned(task, planned)
    rows = []
    for seed, (name, cap) in itertools.product(range(seeds), (("cosine", 1), ("seesaw", options.cap))):
        rows.append({"form": options.form, "schedule": name, "rate": rate, "seed": seed})
        rows[-1] |= train(task, rate, seed, planned, cap)
        print({name: value for name, value in rows[-1].items() if name != "batches"}, flush=True)

    def mean(schedule: str, what: str) -> float:
        return statistics.fmean(row[what] for row in rows if row["schedule"] == schedule)

    ratios = {what: mean("seesaw", what) / mean("cosine", what) for what in ("loss", "steps", "tokens")}
    assert ratios.pop("tokens") == 1.0, "both sides train on the same rows"
    bars = [
        bar(f"{what} of seesaw / cosine at a fixed batch", value=ratios[what], limit=limit, at_least=False)
        for what, limit in (("loss", 1.005), ("steps", 0.7))
    ]
    finish("seesaw", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
