"""What an adaptive batch is worth beside fixed batches whose rate is tuned, and how often a run fails.

Three tasks, one worker each: an MLP and a small CNN (digits shifted by up to a pixel) on scikit-learn's digits, with
SGD, to 97 and 98 % of held-out digits; and a two-layer character GPT on the text of Python's standard library, with
AdamW, to a held-out loss of 1.9.

The clock is a cost curve, so that a busy machine changes nothing and one run tells what machines of several kinds would
take: a step of 16 x the small batch costs q = 1, 1.5, 4 or 16 steps of the small batch, linearly in between (q = 1.5 is
a GPU that is far from full, 16 a CPU). Step times are read from that clock. Looks at them come every 16 steps, as they
do where a step takes 20 ms or more. Halves of a batch are paid for as the two passes that they are; evaluation is free.

Fixed batches have the rate that reached the goal in the fewest steps on other seeds (``--tune`` finds them anew). The
adaptive batch begins at the smallest batch with that batch's own rate, and nothing else is told to it. A run fails that
ends its budget below the fixed small batch's end by more than 2 %.

    python tests/benchmarks/bench_adaptive_value.py [--tasks mlp cnn gpt] [--q 1.5] [--seeds 5] [--first-seed 0]
        [--tune] [--cost] [--adaptdl PYTHON] [--efficiency] [--rules]

``--adaptdl`` puts AdaptDL beside it, see ``adaptdl_side.py``.

``--cost`` measures what the measuring costs instead: CPU time, and wall time, of the average step of an adaptive batch
that does not grow, beside a fixed batch. ``--efficiency`` asks whether the noise predicts what a larger batch needs:
samples to the goal at 4 x the small batch with its rate by the scaling rule, over those at the small batch, beside what
the noise said of it in each step at the small batch. Each step has two gradients.
``--rules`` has two ranks adapt their batch at q = 1.5 under each rule for the learning rate, ten seeds each.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from common import HERE, bar, finish, side_parser

UNIT_S = 0.005  # a step at the small batch, on the cost curve's clock
LOOK_STEPS = 16
TUNING_SEEDS = (100, 101)
CONTEXT = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained.

    Attributes:
        goal: held-out accuracy, or loss where ``falls``.
        falls: less is better.
        batches: fixed ones; the first is the small one.
        rates: tuned rate of each of them.
        budget: longest run, in steps at the small batch.
    """

    goal: float
    falls: bool
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    budget: float


TASKS = {
    "mlp": Task(
        goal=0.97, falls=False, batches=(16, 64, 256), rates=(0.1, 0.4, 0.8), budget=1500.0
    ),
    "cnn": Task(
        goal=0.98, falls=False, batches=(16, 64, 256), rates=(0.04, 0.1, 0.15), budget=3000.0
    ),
    "gpt": Task(
        goal=1.9, falls=True, batches=(8, 64, 128), rates=(0.006, 0.016, 0.012), budget=2000.0
    ),
}  # fmt: skip
TRIED = (0.5, 1.0, 2.0)
QS = (1.0, 1.5, 4.0, 16.0)


# -- one run -------------------------------------------------------------------------------------------------


class CostClock:
    """Stands for the ``time`` module where step times are read."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        """Seconds of the cost curve."""
        return self.now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run; times in steps at the small batch.

    Attributes:
        batch: the fixed one; 0 for the adaptive one.
        time: until the goal, None where it was not reached.
        steps, samples: likewise, else of the whole run.
        end: held-out accuracy, or loss, at the goal or the budget's end.
        best: of all evaluations.
        batches: the batch after each change.
    """

    task: str
    q: float
    batch: int
    rate: float
    seed: int
    time: float | None
    steps: int
    samples: int
    end: float
    best: float
    batches: tuple[int, ...]


def run(name: str, q: float, batch: int, rate: float, seed: int, device: str = "cpu", rule: str | None = None) -> Run:
    """Train until the goal or the budget's end; ``batch`` 0 adapts from the small one to 16 times it or more.

    ``rule`` sets learning rates; None for the one that is taken where the loop names none.
    """
    import torch

    import elastic_ray as er
    import elastic_ray.standalone.session as standalone
    import elastic_ray.steps.step as clock_module
    from elastic_ray.loop.api import current_session

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task, clock = TASKS[name], CostClock()
    clock_module.time = clock  # type: ignore[attr-defined]
    standalone.StandaloneController._poll = lambda self, reference: None
    small = task.batches[0]
    model, optimizer, data, loss_of, score = _prepared(name, rate, device)
    wrapped = er.AdaptiveDataParallel(model, optimizer, nonfinite="ignore", scaling_rule=rule)
    loader = er.AdaptiveDataLoader(data, batch_size=batch or small, seed=seed, drop_last=True)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(seed + 1000 * int(os.environ.get("RANK", "0")))  # ranks shift their digits by themselves
    if not batch:
        loader.autoscale_batch_size(max_batch_size=32 * small)
    session: Any = current_session()
    begin_s, looked, samples, scores, batches = clock.now_s, 0, 0, [], [loader.current_batch_size]
    for _ in er.remaining_epochs_until(100_000):
        for rows in loader:
            optimizer.zero_grad()
            loss_of(wrapped, rows).backward()
            clock.now_s += UNIT_S * (1.0 + (q - 1.0) * (ranks * len(rows[0]) / small - 1.0) / 15.0)
            last = session.ledger.outermost.is_last_micro
            optimizer.step()
            samples += ranks * len(rows[0])
            if not last:
                continue
            steps = session.progress.steps + 1
            if not batch and steps - looked >= LOOK_STEPS:
                looked, report = steps, session.step_report()
                if report is not None:
                    session.controller.observe(report)
            if loader.current_batch_size != batches[-1]:
                batches.append(loader.current_batch_size)
            if steps % 5:
                continue
            scores.append(score(model))
            spent = (clock.now_s - begin_s) / UNIT_S
            reached = scores[-1] <= task.goal if task.falls else scores[-1] >= task.goal
            if reached or spent > task.budget:
                return Run(
                    task=name,
                    q=q,
                    batch=batch,
                    rate=rate,
                    seed=seed,
                    time=spent if reached else None,
                    steps=steps,
                    samples=samples,
                    end=scores[-1],
                    best=min(scores) if task.falls else max(scores),
                    batches=tuple(batches),
                )
    raise AssertionError("the budget ends before the epochs")


def _prepared(name: str, rate: float, device: str) -> tuple[Any, Any, Any, Any, Any]:
    """Model, optimizer, training data, the loss of a batch, and the held-out score of a model."""
    import torch
    from torch import nn

    functional = nn.functional
    if name == "gpt":
        model: Any = _gpt().to(device)
        training, held_out = (each.to(device) for each in _text())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate)

        def loss_of(of: Any, rows: Any) -> Any:
            (x,) = rows
            return functional.cross_entropy(of(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

        def score(of: Any) -> float:
            with torch.no_grad():
                return float(loss_of(of, (held_out,)))

        return model, optimizer, torch.utils.data.TensorDataset(training), loss_of, score
    images, labels, test_images, test_labels = (each.to(device) for each in _digits())
    if name == "mlp":
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    else:
        convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()
        model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.Flatten(), nn.Linear(512, 10))

    def digits_loss(of: Any, rows: Any) -> Any:
        x, y = rows
        return functional.cross_entropy(of(x if name == "mlp" else _shifted(x)), y)

    def digits_score(of: Any) -> float:
        with torch.no_grad():
            return float((of(test_images).argmax(1) == test_labels).float().mean())

    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return model, optimizer, torch.utils.data.TensorDataset(images, labels), digits_loss, digits_score


def _digits() -> tuple[Any, Any, Any, Any]:
    """1437 digits to train on and the 360 that are held out, in every run the same."""
    import torch
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[360:], order[:360]
    return images[training], labels[training], images[held_out], labels[held_out]


def _shifted(images: Any) -> Any:
    """Each image shifted by up to a pixel."""
    import torch
    from torch import nn

    padded = nn.functional.pad(images.view(-1, 8, 8), (1, 1, 1, 1))
    windows = padded.unfold(1, 8, 1).unfold(2, 8, 1).reshape(len(images), 9, 64)
    return windows[torch.arange(len(images)), torch.randint(0, 9, (len(images),)).to(images.device)]


def _gpt() -> Any:
    """110 thousand parameters over 96 characters."""
    import torch
    from torch import nn

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(96, 64), nn.Parameter(0.02 * torch.randn(CONTEXT, 64))
            layer: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, **layer) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 96)
            mask = torch.triu(torch.full((CONTEXT, CONTEXT), float("-inf")), 1)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x: Any) -> Any:
            hidden = self.tokens(x) + self.places
            for layer in self.layers:
                hidden = layer(hidden, src_mask=self.mask)
            return self.head(self.norm(hidden))

    return Gpt()


def _text() -> tuple[Any, Any]:
    """Pieces of 33 characters of the standard library's modules: to train on, and 256 that are held out."""
    import torch

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    text = "".join(file.read_text(errors="ignore") for file in files)
    codes = torch.tensor([min(max(ord(character) - 31, 0), 95) for character in text])
    pieces = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    training, held_out = pieces[:-256], pieces[-256:]
    return training[torch.randperm(len(training), generator=torch.Generator().manual_seed(1))], held_out


# -- what it costs -------------------------------------------------------------------------------------------

COST_STEPS = 160


def cost_of_measuring(tasks: list[str], device: str, *, rounds: int) -> None:
    """Steps of a fixed batch and of an adaptive one that does not grow, in turns, long after a change."""
    rows, bars = [], []
    for name in tasks:
        loops = {kind: _steps(name, device, adapts=kind == "adaptive") for kind in ("fixed", "adaptive")}
        spent: dict[str, list[tuple[float, float]]] = {kind: [] for kind in loops}
        for _, (kind, loop) in itertools.product(range(rounds), loops.items()):
            spent[kind].append(next(loop))
        cpu, wall = (
            {kind: statistics.median(each[i] for each in found) for kind, found in spent.items()} for i in (0, 1)
        )
        rows.append(
            {
                "task": name,
                "device": device,
                "CPU ms a step, fixed": 1e3 * cpu["fixed"],
                "adaptive": 1e3 * cpu["adaptive"],
                "wall ms a step, fixed": 1e3 * wall["fixed"],
                "adaptive ": 1e3 * wall["adaptive"],
            }
        )
        claim = f"{name}: CPU time of the average step / of one that measures nothing"
        bars.append(bar(claim, value=cpu["adaptive"] / cpu["fixed"], limit=1.05, at_least=False))
    finish("adaptive_value_cost", rows=rows, bars=bars)


def _steps(name: str, device: str, *, adapts: bool) -> Iterator[tuple[float, float]]:
    """CPU and wall time of one step [s], the mean over 160 of them each time; each loop in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_steps, args=(theirs, name, device, adapts), daemon=True)
    process.start()
    try:
        while True:
            ours.send(None)
            if not ours.poll(600.0):
                raise TimeoutError(f"{name} took longer than 600 s for {COST_STEPS} steps")
            yield ours.recv()
    finally:
        process.terminate()
        process.join(10.0)


def _serve_steps(pipe: Any, name: str, device: str, adapts: bool) -> None:
    import torch

    import elastic_ray as er
    import elastic_ray.standalone.session as standalone

    torch.set_num_threads(1)
    torch.manual_seed(0)
    standalone.StandaloneController._poll = lambda self, reference: None
    task = TASKS[name]
    model, optimizer, data, loss_of, _ = _prepared(name, 0.1 * task.rates[0], device)
    wrapped, batch = er.AdaptiveDataParallel(model, optimizer), 4 * task.batches[0]
    loader = er.AdaptiveDataLoader(data, batch_size=batch, drop_last=True)
    if adapts:
        loader.autoscale_batch_size(max_batch_size=2 * batch)
    pipe.recv()
    begin_s = cpu_begin_s = 0.0
    done, begun = 0, False
    for _ in er.remaining_epochs_until(1_000_000):
        for rows in loader:
            optimizer.zero_grad()
            loss_of(wrapped, rows).backward()
            optimizer.step()
            done += len(rows[0])
            if done < COST_STEPS * batch:
                continue
            if device != "cpu":
                torch.cuda.synchronize()
            now_s, cpu_s, done = time.perf_counter(), time.process_time(), 0
            if begun:
                pipe.send(((cpu_s - cpu_begin_s) / COST_STEPS, (now_s - begin_s) / COST_STEPS))
                pipe.recv()
                now_s, cpu_s = time.perf_counter(), time.process_time()
            begin_s, cpu_begin_s, begun = now_s, cpu_s, True


# -- what the noise predicts ---------------------------------------------------------------------------------

LARGER = 4


def predicted_efficiency(tasks: list[str], seeds: range, workers: int) -> None:
    """Samples of progress per sample at the larger batch, predicted and measured."""
    wanted = [(task, scale, seed) for task in tasks for scale in (1, LARGER) for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=4) as pool:
        found = list(zip(wanted, pool.starmap(_samples_to_goal, wanted, chunksize=1), strict=True))
    rows, bars = [], []
    for task in tasks:
        small, large = (
            [each for (name, scale, _), each in found if (name, scale) == (task, wished)] for wished in (1, LARGER)
        )
        needed = statistics.median(samples for samples, _ in small), statistics.median(samples for samples, _ in large)
        predicted, measured = statistics.median(each for _, each in small), needed[0] / needed[1]
        rows.append({"task": task, "samples": needed[0], f"at {LARGER} x": needed[1]})
        rows[-1] |= {"efficiency measured": measured, "predicted": predicted}
        off = max(predicted / measured, measured / predicted)
        bars.append(bar(f"{task}: efficiency predicted / measured, or inverse", value=off, limit=1.3, at_least=False))
    finish("adaptive_value_efficiency", rows=rows, bars=bars)


def _samples_to_goal(name: str, scale: int, seed: int) -> tuple[float, float]:
    """Samples of a run at ``scale`` x the small batch, and the efficiency that its noise predicts at ``LARGER`` x."""
    import torch

    import elastic_ray as er
    import elastic_ray.standalone.session as standalone
    from elastic_ray.batch.limits import BatchChoice
    from elastic_ray.loop.api import current_session
    from elastic_ray.membership.messages import BatchProposal

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    standalone.StandaloneController._poll = lambda self, reference: None
    task = TASKS[name]
    small = task.batches[0]
    model, optimizer, data, loss_of, score = _prepared(name, task.rates[0], "cpu")
    wrapped = er.AdaptiveDataParallel(model, optimizer, nonfinite="ignore")
    loader = er.AdaptiveDataLoader(data, batch_size=small, seed=seed, drop_last=True)
    loader.autoscale_batch_size(LARGER * small, local_bsz_bounds=(1, scale * small // 2), gradient_accumulation=True)
    session: Any = current_session()
    samples, needs = 0, list[float]()
    for _ in er.remaining_epochs_until(100_000):
        for rows in loader:
            if session.progress.steps == 0 and scale > 1:
                choice = BatchChoice(atomic_bsz=scale * small // 2, accum_steps=1)
                session.membership.post(BatchProposal(generation=session.membership.generation, batch=choice))
            optimizer.zero_grad()
            loss_of(wrapped, rows).backward()
            last = session.ledger.outermost.is_last_micro
            optimizer.step()
            samples += len(rows[0])
            if not last:
                continue
            if wrapped.noise_scale is not None:
                needs.append(LARGER / wrapped.noise_scale.gain(float(LARGER)))
            if session.progress.steps % 5:
                continue
            now = score(model)
            if (now <= task.goal if task.falls else now >= task.goal) or samples > task.budget * small * scale:
                return float(samples), 1.0 / statistics.mean(needs)
    raise AssertionError("the budget ends before the epochs")


# -- rules for the learning rate -----------------------------------------------------------------------------

RULES = (None, "linear", "sqrt", "legw", "none")


def compare_rules(tasks: list[str], seeds: range) -> None:
    """Two ranks of each run in processes of their own; a run fails that misses the goal."""
    rows, bars = [], []
    for task, rule in itertools.product(tasks, RULES):
        found = [_run_two_ranks(task, rule, seed) for seed in seeds]
        missed = sum(each.time is None for each in found)
        times = [each.time if each.time is not None else float("inf") for each in found]
        row = {"task": task, "rule": rule or "as it is", "time": statistics.median(times)}
        row |= {"missed": f"{missed} of {len(found)}", "last batch": statistics.median(r.batches[-1] for r in found)}
        rows.append(row)
        if rule is None:
            bars.append(bar(f"{task}: runs that miss the goal", value=float(missed), limit=0, at_least=False))
    finish("adaptive_value_rules", rows=rows, bars=bars)


def _run_two_ranks(task: str, rule: str | None, seed: int) -> Run:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        ranks = [pool.apply_async(_run_rank, (task, rule, seed, rank, port)) for rank in range(2)]
        first, _ = (each.get(timeout=1200.0) for each in ranks)
    print(f"  {rule}: {first}", flush=True)
    return first


def _run_rank(task: str, rule: str | None, seed: int, rank: int, port: int) -> Run:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return run(task, 1.5, 0, TASKS[task].rates[0], seed, rule=rule)


# -- all runs ------------------------------------------------------------------------------------------------


_Arguments: TypeAlias = "tuple[str, float, int, float, int, str]"


def _tuned(task: str, device: str) -> Iterator[_Arguments]:
    """What ``--tune`` runs: each fixed batch with rates around the present one, at the cheapest cost curve."""
    for batch, rate in zip(TASKS[task].batches, TASKS[task].rates, strict=True):
        for factor, seed in itertools.product(TRIED, TUNING_SEEDS):
            yield task, 1.0, batch, rate * factor, seed, device


def _all(runs: list[_Arguments], workers: int) -> list[Run]:
    """Carry them out in fresh processes, a few at a time."""
    found = []
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=4) as pool:
        for each in pool.imap(_run, runs):
            print(f"  {each}", flush=True)
            found.append(each)
    return found


def _run(arguments: _Arguments) -> Run:
    return run(*arguments)


def _run_adaptdl(python: str, task: str, q: float, seed: int) -> Run:
    command = [python, str(HERE / "adaptdl_side.py"), task, str(q), str(seed)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"AdaptDL's run ended with {done.returncode}: {done.stderr[-2000:]}")
    fields = json.loads(done.stdout.splitlines()[-1])
    found = Run(**{**fields, "batches": tuple(fields["batches"])})
    print(f"  AdaptDL: {found}", flush=True)
    return found


def _cost(each: Run, q: float) -> float:
    """Time of a fixed batch's run at another cost curve, in steps at the small batch; infinite where it failed."""
    if each.time is None:
        return float("inf")
    return each.steps * (1.0 + (q - 1.0) * (each.batch / TASKS[each.task].batches[0] - 1.0) / 15.0)


def main() -> None:
    """Tuned rates, or the tables."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--q", nargs="+", type=float, default=list(QS))
    parser.add_argument("--seeds", type=int, default=None, help="runs of each row, 5 unless --quick")
    parser.add_argument("--first-seed", type=int, default=0, help="others than those on which a setting was chosen")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--device", default="cpu", help="of the models")
    parser.add_argument("--cost", action="store_true", help="measure what the measuring costs")
    parser.add_argument("--efficiency", action="store_true", help="compare it with what the noise predicts")
    parser.add_argument("--rules", action="store_true", help="compare the rules for the learning rate on two ranks")
    parser.add_argument("--adaptdl", metavar="PYTHON", help="of an environment with AdaptDL")
    parser.add_argument("--tune", action="store_true", help="try rates around those in this file")
    options = parser.parse_args()
    if options.cost:
        cost_of_measuring(options.tasks, options.device, rounds=2 if options.quick else 10)
        return
    if options.tune:
        tried = _all([each for task in options.tasks for each in _tuned(task, options.device)], options.workers)
        keys = sorted({(each.task, each.batch, each.rate) for each in tried})
        rows = []
        for key in keys:
            mine = [each for each in tried if (each.task, each.batch, each.rate) == key]
            steps = statistics.mean(each.steps if each.time is not None else float("inf") for each in mine)
            rows.append(dict(zip(("task", "batch", "rate"), key, strict=True)) | {"steps to the goal": steps})
        finish("adaptive_value_tuning", rows=rows, bars=[])
        return
    seeds = range(options.first_seed, options.first_seed + (options.seeds or (1 if options.quick else 5)))
    if options.efficiency:
        predicted_efficiency(options.tasks, seeds, options.workers)
        return
    if options.rules:
        compare_rules(options.tasks, range(options.seeds or 10))
        return
    wanted: list[_Arguments] = []
    for task, seed in itertools.product(options.tasks, seeds):
        known = TASKS[task]
        wanted += [(task, 1.0, *each, seed, options.device) for each in zip(known.batches, known.rates, strict=True)]
        wanted += [(task, q, 0, known.rates[0], seed, options.device) for q in options.q]
    runs = _all(wanted, options.workers)
    rows, bars = [], []
    failures = adaptive_runs = 0
    for task, q in itertools.product(options.tasks, options.q):
        known = TASKS[task]
        fixed = {batch: [r for r in runs if (r.task, r.batch) == (task, batch)] for batch in known.batches}
        ours = [r for r in runs if (r.task, r.batch, r.q) == (task, 0, q)]
        times = {batch: statistics.median(_cost(each, q) for each in mine) for batch, mine in fixed.items()}
        best = min(times, key=times.__getitem__)
        took = statistics.median(each.time if each.time is not None else float("inf") for each in ours)
        ends = statistics.median(each.best for each in fixed[known.batches[0]])
        failed = sum(each.best > 1.02 * ends if known.falls else each.best < 0.98 * ends for each in ours)
        failures, adaptive_runs = failures + failed, adaptive_runs + len(ours)
        samples = statistics.median(each.samples for each in ours)
        of_best = statistics.median(each.samples for each in fixed[best])
        small = times[known.batches[0]]
        beside = {}
        if options.adaptdl:
            theirs = [_run_adaptdl(options.adaptdl, task, q, seed) for seed in seeds]
            met = statistics.median(each.time if each.time is not None else float("inf") for each in theirs)
            last = statistics.median(each.batches[-1] for each in theirs)
            beside = {"AdaptDL": met, "AdaptDL to small": met / small, "its last batch": last}
        rows.append(
            {
                "task": task,
                "q": q,
                **{f"fixed {place}": f"{batch}: {times[batch]:.0f}" for place, batch in enumerate(known.batches)},
                "adaptive": took,
                "to small": took / small,
                "to best": took / times[best],
                "samples to best": samples / of_best,
                "failed": f"{failed} of {len(ours)}",
                "last batch": statistics.median(each.batches[-1] for each in ours),
                **beside,
            }
        )
        if q == 1.5:
            bars.append(bar(f"{task}, q 1.5: time / tuned small batch", value=took / small, limit=0.35, at_least=False))
        claim = f"{task}, q {q:g}: time / best tuned batch ({best})"
        bars.append(bar(claim, value=took / times[best], limit=1.15, at_least=False))
        if q >= 4.0:
            claim = f"{task}, q {q:g}: samples / best tuned batch's"
            bars.append(bar(claim, value=samples / of_best, limit=1.3, at_least=False))
    bars.append(bar(f"failed runs of {adaptive_runs}", value=float(failures), limit=0, at_least=False))
    finish("adaptive_value", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
