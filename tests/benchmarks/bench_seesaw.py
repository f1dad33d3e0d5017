"""Seesaw beside a tuned cosine at a fixed batch: held-out loss and serial steps of a GPT at equal tokens.

A byte-level GPT trains on the Python sources of torch, every 20th file of which is held out. One process, no Ray. First
the fixed batch tries highest rates, twice and half as high, for a quarter of the tokens, until the best lies between
worse ones. Then for each seed: AdamW with a cosine to 0 at the fixed batch, and the same as ``schedule="seesaw"``,
whose batch may grow to ``--cap`` times the first one. Both have the same rate, rows and initial weights.

Before that a few steps are timed: a run has as many tokens as fit ``--minutes``, all runs and the search together, and
each row of text is used at most once. ``--steps`` gives the steps of the fixed batch instead.

Two forms: ``small`` (1.1 M parameters, batches of 512 tokens) and ``large`` (11 M, 8192 tokens; bf16 on a GPU).

    python tests/benchmarks/bench_seesaw.py --minutes 15                                small, on a CPU
    python tests/benchmarks/bench_seesaw.py --device cuda --form large --minutes 5      on a GPU
        [--seeds 3] [--cap 4] [--rate 1e-3 (no search)] [--steps 800] [--profiles FOLDER]

Bars: mean loss at most 0.5 % above that of the fixed batch, with at most 0.7 x its steps.

``--profiles`` also computes how long these batches would take where step times were published (Pollux's BERT, Sia's
pipelined GPT; the first batch is the profile's initial one, batches grow alike). Each step takes the profile's time on
1 to 4 workers of one node; pauses of a resize, under a second each, are left out. Beside a fixed batch on each number
of workers stands Seesaw, whose workers ``CostPerProgress`` chooses for each batch, at the value of an hour with which
it is soonest done for at most 1.05 x the GPU-hours. Bar: 0.7 x the time of the fixed batch on one worker, and of the
fixed batch on the workers with which it is soonest done.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
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


# -- simulated time ------------------------------------------------------------------------------------------

MOST_WORKERS, MORE_GPU_HOURS, SOONER = 4, 1.05, 0.7
VALUES = (0.0, *(2.0 ** (power / 4) for power in range(-24, 41)))  # of an hour [GPU-hours]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Published step times of an application on workers of one node.

    Attributes:
        times: (step time, its synchronisation) [s] of workers and samples of a micro-step.
        first: initial batch [samples].
        local: fewest and most samples of a worker's micro-step.
    """

    name: str
    times: Callable[[tuple[int, ...], float], tuple[float, float]]
    first: int
    local: tuple[int, int]

    def step_s(self, scale: float, workers: int) -> float:
        """Time of a step at ``scale`` x the initial batch [s]; infinity if a worker's share is too small."""
        share = scale * self.first / workers
        if share < self.local[0]:
            return math.inf
        micro_steps = math.ceil(share / self.local[1])
        step_s, sync_s = self.times((workers,), share / micro_steps)
        return step_s + (micro_steps - 1) * (step_s - sync_s)


def profiles_in(folder: Path) -> list[Profile]:
    """Return the language models of a folder of published profiles."""
    from bench_forecast import gpt as pipelined

    from placement.simulator.workloads.profiles import load_profiles

    found = {"BERT, T4": (load_profiles(folder, ("aws",))["bert"], "aws")}
    found["BERT, A100"] = load_profiles(folder, ("dgx-ext",))["bert"], "dgx-ext"
    found["GPT in pipelines of two A100"] = pipelined(folder), "dgx-ext"
    return [
        Profile(
            name=name,
            times=each.step_times[gpu].times,
            first=each.init_batch_size,
            local=each.local_bsz_range(gpu),
        )
        for name, (each, gpu) in found.items()
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Simulated cost of a run, and the workers of its batches."""

    hours: float
    worker_hours: float
    workers: str


def scales(batches: str, first: int) -> list[tuple[float, int]]:
    """Return (batch / first one, steps) of ``8x91 10x31 ...``; a last partial batch counts as a first one."""
    pairs = (map(int, each.split("x")) for each in batches.split())
    return [(max(1.0, size / first), steps) for size, steps in pairs]


def spend(profile: Profile, changes: Sequence[tuple[float, int]], choose: Callable[[float, int], int]) -> Spent:
    """Sum up ``(scale, steps)``, on as many workers as are chosen for a scale and the present workers."""
    hours, worker_hours, workers, used = 0.0, 0.0, 0, list[int]()
    for scale, steps in changes:
        workers = choose(scale, workers)
        taken_h = steps * profile.step_s(scale, workers) / 3600.0
        hours, worker_hours = hours + taken_h, worker_hours + taken_h * workers
        used.append(workers)
    return Spent(
        hours=hours, worker_hours=worker_hours, workers=" ".join(str(each) for each, _ in itertools.groupby(used))
    )


def by_placement(profile: Profile, value: float) -> Callable[[float, int], int]:
    """Return the decision of ``CostPerProgress`` for a batch, if an hour is worth so many GPU-hours."""
    import numpy as np

    from placement.autoscaling.objectives.base import Demand, NodeTypeOption
    from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
    from placement.cluster.jobs import JobView
    from placement.cluster.node_types import NodeType

    objective = CostPerProgress(value_usd_per_h=value)
    kind = NodeType(name="gpu", resources={"GPU": 1.0}, max_nodes=MOST_WORKERS, startup_s=0.0)
    sizes = np.arange(1.0, MOST_WORKERS + 1)

    def choose(scale: float, workers: int) -> int:
        rate = np.array([scale / profile.step_s(scale, each) for each in range(1, MOST_WORKERS + 1)])
        offer = NodeTypeOption(kind=kind, rate=rate, known=True, part_usd=sizes, whole_usd=sizes, limit=MOST_WORKERS)
        held = {"node": workers} if workers else {}
        view = JobView(job="gpt", bundle={"GPU": 1.0}, max_workers=MOST_WORKERS, allocation=held)
        demand = Demand(jobs=(view,), offers={"gpt": (offer,)}, spent_usd={}, gpus={"gpt": kind.gpu_type})
        return objective.decide(demand, 0.0)["gpt"].workers

    return choose


def simulated(
    profiles: Sequence[Profile], fixed_steps: int, changes: Sequence[tuple[float, int]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of Seesaw beside the fixed batch on each number of workers, and their bars."""
    rows, bars = list[dict[str, Any]](), list[dict[str, Any]]()
    for profile in profiles:
        grown = [spend(profile, changes, by_placement(profile, value)) for value in VALUES]
        found: list[dict[str, Any]] = []
        for workers in range(1, MOST_WORKERS + 1):
            fixed = spend(profile, [(1.0, fixed_steps)], lambda scale, now, workers=workers: workers)
            affordable = [each for each in grown if each.worker_hours <= MORE_GPU_HOURS * fixed.worker_hours]
            if math.isinf(fixed.hours) or not affordable:
                continue
            best = min(affordable, key=lambda each: (each.hours, each.worker_hours))
            row = {"profile": profile.name, "fixed on": workers, "hours": fixed.hours, "seesaw on": best.workers}
            row["time x"], row["GPU-hours x"] = best.hours / fixed.hours, best.worker_hours / fixed.worker_hours
            found.append(row)
        if not found:
            continue  # no size of the fixed batch fits, or none that growth can afford
        soonest = min(found, key=lambda row: row["hours"])
        against = {"one worker": found[0], f"{soonest['fixed on']} workers, the soonest": soonest}
        bars += [
            bar(
                f"{profile.name}: simulated time of seesaw / the fixed batch on {where}, at most 1.05 x GPU-hours",
                value=row["time x"],
                limit=SOONER,
                at_least=False,
            )
            for where, row in against.items()
        ]
        rows += found
    return rows, bars


def main() -> None:
    """Command line."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--form", choices=FORMS, default="small")
    parser.add_argument("--minutes", type=float, default=15.0, help="of all runs together")
    parser.add_argument("--steps", type=int, default=None, help="of a run at the fixed batch, in place of --minutes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cap", type=int, default=4, help="largest batch, in first ones")
    parser.add_argument("--rate", type=float, default=None, help="highest rate; found first if left out")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--profiles", type=Path, default=None, help="published step times, for the simulated time")
    options = parser.parse_args()
    profiles = [] if options.profiles is None else profiles_in(options.profiles)  # a wrong folder is an error at once
    if options.minutes <= 0 or options.seeds < 1 or options.cap < 2 or (options.steps or LEAST_STEPS) < LEAST_STEPS:
        parser.error(f"needs --minutes above 0, --seeds of 1 or more, --cap of 2 or more, --steps from {LEAST_STEPS}")
    import torch

    torch.set_num_threads(options.threads)
    task = prepare(FORMS[options.form], options.device)
    seeds, minutes = (1, 0.5) if options.quick else (options.seeds, options.minutes)
    planned = options.steps or affordable(task, minutes, seeds, searches=options.rate is None)
    if planned * task.form.batch > len(task.rows):
        parser.error(
            f"--steps must be at most {len(task.rows) // task.form.batch}, for the text ends, but got {planned}"
        )
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
    if profiles:
        slowest = max((row for row in rows if row["schedule"] == "seesaw"), key=lambda row: row["steps"])
        changes = scales(slowest["batches"], task.form.batch)
        simulated_rows, bars = simulated(profiles, rows[0]["steps"], changes)
        finish("seesaw_time", rows=simulated_rows, bars=bars)


if __name__ == "__main__":
    main()
