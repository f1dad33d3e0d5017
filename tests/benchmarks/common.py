"""What all benchmarks share: the model, the log of committed steps, and how results are printed."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# Workers import this module by name. Set before Ray's processes inherit the environment.
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(HERE), os.environ.get("PYTHONPATH", "")])
sys.path[:0] = [str(REPOSITORY)]

FEATURES = 2048
CLASSES = 10
GLOBAL_BATCH = 24
CHECKPOINT_EVERY = 10
# One worker. The head has CPUs for Ray's own actors, but no slot, so neither system trains there.
BUNDLE = {"CPU": 1, "slot": 1}


# -- the job that is measured --------------------------------------------------------------------------------


def build_model() -> Any:
    """25.2 million parameters (100 MB, 200 MB with momentum) and a buffer that counts committed steps."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 3072),
        torch.nn.ReLU(),
        torch.nn.Linear(3072, 3072),
        torch.nn.ReLU(),
        torch.nn.Linear(3072, 3072),
        torch.nn.ReLU(),
        torch.nn.Linear(3072, CLASSES),
    )
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    return model


def build_optimizer(model: Any) -> Any:
    """SGD with momentum: as much state again as the model has parameters."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


class Rows:
    """A map-style dataset that costs nothing to read: 100,000 rows over 256 different ones."""

    def __init__(self) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(256, FEATURES, generator=generator)
        self._y = torch.randint(CLASSES, (256,), generator=generator)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._x[index % 256], self._y[index % 256]


# -- the log of committed steps ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step that rank 0 committed: when [s since the epoch], in which world size, and its number."""

    time_s: float
    world: int
    step: int


class StepLog:
    """A file to which whoever is rank 0 appends a line per committed step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *, world: int, step: int) -> None:
        """One committed step, now. A short append is atomic, so ranks may take turns."""
        with self.path.open("a") as file:
            file.write(f"{time.time():.6f} {world} {step}\n")

    def read(self) -> list[StepRecord]:
        """All complete lines so far."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [StepRecord(time_s=float(t), world=int(w), step=int(s)) for t, w, s in rows]

    def wait_for(self, *, world: int, steps: int, since_s: float, timeout_s: float) -> bool:
        """Wait until ``steps`` steps were committed after ``since_s`` in a group of ``world``."""

        def reached() -> bool:
            return sum(1 for r in self.read() if r.time_s > since_s and r.world == world) >= steps

        return wait_until(reached, timeout_s)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll; False when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """What one event cost.

    Attributes:
        gap_s: longest time without a committed step between the event and the end of the observation.
        step_s: the time that a step takes anyway: median time between two committed steps before the event or
            after the gap, whichever is larger.
        reached_s: from the event to the first committed step of the group that it leads to; None = never.
        redone: steps that were committed more than once.
        lost: the event never led there within the time given; then ``gap_s`` is a lower bound.
    """

    gap_s: float
    step_s: float
    reached_s: float | None
    redone: int
    lost: bool = False

    @property
    def pause_s(self) -> float:
        """The gap less the time that a step takes anyway."""
        return max(0.0, self.gap_s - self.step_s)


def measure_pause(records: Sequence[StepRecord], *, event_s: float, world: int, end_s: float) -> Pause:
    """What the event at ``event_s``, which should lead to ``world`` workers, cost until ``end_s``."""
    before = [r for r in records if r.time_s <= event_s]
    after = [r for r in records if event_s < r.time_s <= end_s]
    if not before:
        raise ValueError("no step was committed before the event: wait for the first steps of the group")
    times = [before[-1].time_s, *(r.time_s for r in after)]
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    lost = not any(r.world == world for r in after)
    if lost:
        gaps.append(end_s - times[-1])
    longest = max(range(len(gaps)), key=gaps.__getitem__)
    seen: set[int] = {r.step for r in before}
    redone = sum(1 for r in after if r.step in seen)
    return Pause(
        gap_s=gaps[longest],
        step_s=max(_median_step(before[-20:]), _median_step(after[longest:])),
        reached_s=next((r.time_s - event_s for r in after if r.world == world), None),
        redone=redone,
        lost=lost,
    )


def _median_step(records: Sequence[StepRecord]) -> float:
    gaps = [b.time_s - a.time_s for a, b in itertools.pairwise(records) if a.world == b.world]
    return statistics.median(gaps) if gaps else 0.0


# -- results -------------------------------------------------------------------------------------------------


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as a table; the columns are the first row's keys."""
    if not rows:
        return
    header = list(rows[0])
    cells = [header, *([_text(row.get(name)) for name in header] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    for number, line in enumerate(cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    sys.stdout.flush()


def print_json(benchmark: str, *, rows: Sequence[Mapping[str, Any]], bars: Sequence[Mapping[str, Any]]) -> None:
    """The whole result as one line, for whoever collects results."""
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "time_s": round(time.time())}
    result = {"benchmark": benchmark, "arguments": sys.argv[1:], "rows": rows, "bars": bars, "machine": machine}
    print(json.dumps(result), flush=True)


def bar(claim: str, *, value: float | None, limit: float, at_least: bool) -> dict[str, Any]:
    """One line of the table of bars: what was reached against what must be (None: not run)."""
    met = None if value is None else (value >= limit if at_least else value <= limit)
    sign = ">=" if at_least else "<="
    return {"claim": claim, "reached": value, "must be": f"{sign} {limit:g}", "met": met}


def finish(benchmark: str, *, rows: Sequence[Mapping[str, Any]], bars: Sequence[Mapping[str, Any]]) -> None:
    """Print rows, bars and the JSON line."""
    print(f"\n{benchmark}: {os.cpu_count()} CPUs, gloo")
    print_table(rows)
    print()
    print_table(bars)
    print_json(benchmark, rows=rows, bars=bars)


def ratio(baseline: float | None, ours: float | None) -> float | None:
    """How many times shorter ours is; None when one side was not run."""
    if baseline is None or ours is None:
        return None
    return baseline / max(ours, 1e-3)  # a millisecond is what the log resolves


def median(values: Iterable[float]) -> float | None:
    """Median, None of nothing."""
    listed = list(values)
    return statistics.median(listed) if listed else None


def side_parser(description: str, *, sides: bool = True) -> argparse.ArgumentParser:
    """The options that benchmarks share; ``sides`` for those that compare with Ray Train."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short repetition: shows that it runs")
    if sides:
        parser.add_argument("--side", choices=("both", "ray-train", "elastic-ray"), default="both")
        parser.add_argument("--repeats", type=int, default=None, help="repetitions of each side")
    return parser


def arguments(description: str) -> argparse.Namespace:
    """The parsed options of a benchmark with two sides."""
    options = side_parser(description).parse_args()
    options.repeats = options.repeats or (1 if options.quick else 3)
    return options


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)
