"""How well one worker knows its gradient's noise scale: by layers, by halves of a batch, by successive gradients.

A model is trained for a while and then stays as it is. Batches are drawn, with replacement, from samples of which all
gradients are known, so that signal and noise are known exactly, in the optimizer's units. Beside each other:

- layers: single samples' gradients in layers, in every step (``sync/statistics/example_norms.py``),
- samples: the gradient of each sample by itself, in every step: all that one batch can tell,
- halves: each 16th step in two halves, as models do whose layers do not show it,
- pairs: two successive gradients, each 16th step. The model rests here; while it trains, its moves count as noise.

The bias by layers is that of the noise scale S / G2 from what they find on average, over all samples in batches and all
columns in turn. The spread of the noise scale is to first order: the standard deviation of s / S - g / G2 over
estimates (s, g). Beside it stands that of G2 alone, the squared norm of the true gradient. What layers add to the
spread by samples is taken over 32 steps, in which each column comes once. Steps to a noise scale with a standard error
of a quarter are proportional to the spread's square. "norms alone" is the noise scale of normalisation layers only.

No estimate from one batch of 8 samples alone can have a spread of G2 below 0.354 (no noise) to 0.378 (noise alone) of
the pairs' at equal steps: the mean of <g_i, g_j> over all pairs of B samples has the variance 4 a / B + 2 b / (B (B -
1)), that of two batches 2 a / B + b / B^2, of which one in 16 steps has one.

``--cost`` measures what a step costs instead: loops of an adaptive batch that does not grow and of a fixed batch take
turns, two processes of one thread, CPU time of the average step of 50.

    python tests/benchmarks/bench_noise.py [--models mlp cnn gpt gpt-adam] [--steps 640] [--cost]
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench_adaptive_value import _prepared
from common import REPOSITORY, bar, finish, side_parser

SPACING = 16  # of halves, long after a change of the batch
BLOCK = 64
TURN = 32  # steps in which layers measure each column once
BATCHES = 15  # of known samples; odd, so that each has all columns in 32 turns
TRAINED = 60
MODELS = {"mlp": ("mlp", 0.1, 16), "cnn": ("cnn", 0.04, 16), "gpt": ("gpt", 0.006, 8), "gpt-adam": ("gpt", 0.006, 8)}
COST_STEPS = 50
SIZES = {"small": (48, 2), "large": (128, 4)}  # width and layers of a GPT

Estimate = tuple[float, float]
"""Trace of the covariance, squared norm of the true gradient."""


class Meter:
    """Gradients of a model that stays as it is, in the optimizer's units."""

    def __init__(self, name: str) -> None:
        import torch

        from elastic_ray.sync.operations.buckets import Bucket
        from elastic_ray.sync.preconditioners import preconditioner
        from elastic_ray.sync.statistics.example_norms import ExampleNorms

        task, rate, self.batch = MODELS[name]
        torch.manual_seed(0)
        self.model, self.optimizer, data, self.loss_of, _ = _prepared(task, rate, "cpu")
        if task == "cnn":  # shifts of the training are drawn anew each time; here samples are what they are
            self.loss_of = lambda model, rows: torch.nn.functional.cross_entropy(model(rows[0]), rows[1])
        for _ in range(TRAINED):
            places = torch.randint(len(data), (self.batch,))
            self.gradient([each[places] for each in data.tensors])
            self.optimizer.step()
        self.params = list(self.model.parameters())
        self.factors = preconditioner(self.optimizer, self.params) if name.endswith("adam") else None
        self.known = BATCHES * self.batch
        order = torch.randperm(len(data))[: self.known]
        self.rows = [each[order] for each in data.tensors]
        self.bucket, self.norms = Bucket(0, 0, self.params), ExampleNorms(self.model, self.params, every=1)

    def gradient(self, rows: Sequence[Any]) -> None:
        """Put the gradient of these rows into ``.grad``."""
        self.optimizer.zero_grad()
        self.loss_of(self.model, rows).backward()

    def squared(self, grads: Sequence[Any] | None = None) -> list[float]:
        """Squared norm of each parameter's gradient."""
        import torch

        grads = [p.grad for p in self.params] if grads is None else grads
        if self.factors is not None:
            return [float(each) for each in self.factors.squared_norms(self.params, grads)]
        return [float(each) ** 2 for each in torch._foreach_norm(list(grads))]

    def exact(self, of: Sequence[bool] | None = None) -> Estimate:
        """S and G2 of batches drawn from the known samples, of some of the parameters."""
        chosen = [True] * len(self.params) if of is None else of
        mean_sq, mean = 0.0, [p.detach() * 0.0 for p in self.params]
        for i in range(self.known):
            self.gradient([each[i : i + 1] for each in self.rows])
            mean_sq += sum(itertools.compress(self.squared(), chosen)) / self.known
            mean = [m + p.grad / self.known for m, p in zip(mean, self.params, strict=True)]
        whole = sum(itertools.compress(self.squared(mean), chosen))
        return mean_sq - whole, whole

    def drawn(self) -> list[Any]:
        """A batch."""
        import torch

        places = torch.randint(self.known, (self.batch,))
        return [each[places] for each in self.rows]

    def by_layers(self, step: int, rows: Sequence[Any]) -> tuple[Estimate, list[Any]]:
        """One step's estimate, and its gradient."""
        self.norms.start(step, self.batch, [self.bucket], lambda bucket: self.factors)
        self.gradient(rows)
        found = self.norms.end()
        assert found is not None, "layers show it"
        whole, seen = sum(each.whole for each in found), sum(each.seen for each in found)
        examples = self.batch * sum(each.seen_examples for each in found) * whole / seen
        return _estimate(examples, whole, self.batch, self.batch), [p.grad.clone() for p in self.params]

    def expected(self, exact: Estimate) -> Estimate:
        """What layers find on average: each sample and column once, and the size of a batch's gradient as it is."""
        (trace, signal), examples = exact, 0.0
        for step, number in itertools.product(range(TURN), range(BATCHES)):
            part = slice(number * self.batch, (number + 1) * self.batch)
            (var, sqr), _ = self.by_layers(step, [each[part] for each in self.rows])
            examples += (var + sqr) / (TURN * BATCHES)
        return _estimate(examples, signal + trace / self.batch, self.batch, self.batch)

    def by_two(self, first: Sequence[Any], second: Sequence[Any], batch: int) -> Estimate:
        """The estimate by two gradients, whose mean is one at this batch."""
        both = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        mean_sq = (sum(self.squared(first)) + sum(self.squared(second))) / 2
        return _estimate(mean_sq, sum(self.squared(both)), 2, batch)

    def by_samples(self, rows: Sequence[Any]) -> Estimate:
        """The estimate by the gradient of each sample."""
        import torch

        mean_sq, grads = 0.0, []
        for i in range(self.batch):
            self.gradient([each[i : i + 1] for each in rows])
            mean_sq += sum(self.squared()) / self.batch
            grads.append([p.grad.clone() for p in self.params])
        mean = [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]
        return _estimate(mean_sq, sum(self.squared(mean)), self.batch, self.batch)

    def by_halves(self, rows: Sequence[Any]) -> Estimate:
        """The estimate of a step that is halved."""
        found = []
        for half in (slice(None, self.batch // 2), slice(self.batch // 2, None)):
            self.gradient([each[half] for each in rows])
            found.append([p.grad.clone() for p in self.params])
        return self.by_two(found[0], found[1], self.batch)


def _parts(found: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    """Whole parts of so many."""
    return (found[at : at + size] for at in range(0, len(found) - size + 1, size))


def _estimate(mean_sq: float, sq_of_mean: float, samples: int, batch: int) -> Estimate:
    from elastic_ray.sync.statistics.noise_scale import estimate

    found = estimate(mean_sq_norm=mean_sq, sq_norm_of_mean=sq_of_mean, samples=samples, scale=float(batch))
    return found.var, found.sqr


def compare(names: Sequence[str], steps: int) -> None:
    """The three ways, at rest."""
    import torch

    torch.set_num_threads(1)
    rows, bars = [], []
    for name in names:
        meter = Meter(name)
        trace, signal = meter.exact()
        normal = [id(p) for m in meter.model.modules() if "Norm" in type(m).__name__ for p in m.parameters()]
        alone = meter.exact([id(p) in normal for p in meter.params]) if normal else (math.nan, math.nan)
        found: dict[str, list[Estimate]] = {"layers": [], "samples": [], "halves": [], "pairs": []}
        before: list[Any] | None = None
        for step in range(steps):
            drawn = meter.drawn()
            estimate, gradient = meter.by_layers(step, drawn)
            found["layers"].append(estimate)
            if before is not None:
                found["pairs"].append(meter.by_two(before, gradient, 2 * meter.batch))
            found["samples"].append(meter.by_samples(drawn))
            found["halves"].append(meter.by_halves(drawn))
            before = gradient
        for way, estimates in found.items():
            spacing = 1 if way in ("layers", "samples") else SPACING
            mean = statistics.fmean(s for s, _ in estimates), statistics.fmean(g for _, g in estimates)
            trace_found, signal_found = meter.expected((trace, signal)) if way == "layers" else mean
            noise = trace_found / signal_found
            row = {"model": name, "way": way, "exact noise": trace / signal, "noise / exact": noise * signal / trace}
            for what, weight in (("G2", 0.0), ("noise", 1.0)):
                each, all_known = (
                    [weight * s / trace - g / signal for s, g in of] for of in (estimates, found["samples"])
                )
                variance = statistics.pvariance(all_known if way == "layers" else each)
                if way == "layers":
                    added = [one - other for one, other in zip(each, all_known, strict=True)]
                    variance += TURN * statistics.pvariance(map(statistics.fmean, _parts(added, TURN)))
                row[f"sd of a step's {what}"] = math.sqrt(variance)
            row[f"sd of {BLOCK} steps"] = row["sd of a step's noise"] * math.sqrt(spacing / BLOCK)
            row["steps to a quarter"] = spacing * (4 * row["sd of a step's noise"]) ** 2
            rows.append(row | {"norms alone / exact": alone[0] / alone[1] * signal / trace})
        layers, _, halves, pairs = rows[-4:]
        bars.append(bar(f"{name}: bias by layers", value=abs(layers["noise / exact"] - 1), limit=0.05, at_least=False))
        for what, (way, each) in itertools.product(("noise", "G2"), (("halves", halves), ("pairs", pairs))):
            sd = f"sd of a step's {what}"
            ratio = layers[sd] / each[sd] / math.sqrt(SPACING)
            bars.append(bar(f"{name}: spread of {what} by layers / by {way}", value=ratio, limit=1 / 3, at_least=False))
    finish("noise", rows=rows, bars=bars)


# -- what it costs -------------------------------------------------------------------------------------------


def cost(rounds: int) -> None:
    """Steps of a fixed batch and of an adaptive one that does not grow, in turns, long after a change."""
    rows, bars = [], []
    for size in SIZES:
        spent: dict[bool, list[float]] = {False: [], True: []}
        counts: list[float] = []
        loops = {adapts: _steps(size, adapts) for adapts in spent}
        for _, (adapts, loop) in itertools.product(range(rounds), loops.items()):
            seconds, measured = next(loop)
            spent[adapts].append(seconds)
            counts += [measured] if adapts else []
        fixed, adaptive = (statistics.median(spent[adapts]) for adapts in (False, True))
        rows.append({"GPT": size, "ms a step": 1e3 * fixed, "measured": statistics.fmean(counts)})
        rows[-1]["adaptive / fixed"] = adaptive / fixed
        bars.append(bar(f"{size} GPT: step that adapts / fixed", value=adaptive / fixed, limit=1.01, at_least=False))
    finish("noise_cost", rows=rows, bars=bars)


def _steps(size: str, adapts: bool) -> Iterator[tuple[float, float]]:
    """CPU time of the average step [s], and the share of the steps that were measured."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_steps, args=(theirs, size, adapts), daemon=True)
    process.start()
    try:
        while True:
            ours.send(None)
            if not ours.poll(600.0):
                raise TimeoutError(f"{COST_STEPS} steps took longer than 600 s")
            yield ours.recv()
    finally:
        process.terminate()
        process.join(10.0)


def _serve_steps(pipe: Any, size: str, adapts: bool) -> None:
    import torch

    import elastic_ray as er
    import elastic_ray.standalone.session as standalone

    sys.path.append(str(REPOSITORY / "examples"))
    import gpt_tokens

    torch.set_num_threads(1)
    torch.manual_seed(0)
    standalone.StandaloneController._poll = lambda self, reference: None
    width, layers = SIZES[size]
    gpt = gpt_tokens.GPT(width, layers)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    model = er.AdaptiveDataParallel(gpt, optimizer)
    rows, _ = gpt_tokens.text_of(1 << 18)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(rows), batch_size=16, drop_last=True)
    if adapts:
        loader.autoscale_batch_size(32)
    pipe.recv()
    done, began_s, updates = -COST_STEPS, 0.0, 0
    for _ in er.remaining_epochs_until(1_000_000):
        for (text,) in loader:
            optimizer.zero_grad()
            gpt_tokens.loss_of(model, text).backward()
            optimizer.step()
            done += 1
            if done not in (0, COST_STEPS):
                continue
            if done:
                found = model._tracker.signal.updates
                pipe.send(((time.process_time() - began_s) / COST_STEPS, (found - updates) / COST_STEPS))
                pipe.recv()
            done, began_s, updates = 0, time.process_time(), model._tracker.signal.updates


def main() -> None:
    """Command line."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each loop")
    arguments = parser.parse_args()
    if arguments.cost:
        cost(2 if arguments.quick else arguments.rounds)
    else:
        compare(arguments.models, 64 if arguments.quick else arguments.steps)


if __name__ == "__main__":
    main()
