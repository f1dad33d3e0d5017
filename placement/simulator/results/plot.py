"""Picture of the allocation over time, with a row for each node and bars coloured by job."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from placement.errors import InputError
from placement.palette import rgb, shade_of
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.results.report import SimulationReport
from placement.text import count

_HUES = {"cifar10": 0, "ncf": 4, "deepspeech2": 2, "bert": 1, "yolov3": 5, "imagenet": 3}


def check_picture(path: Path) -> None:
    """Raise InputError unless Matplotlib is installed and can write files with this extension."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs Matplotlib; install it with: pip install 'elastic-ray[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in kinds:
        raise InputError(f"plot must be a file of kind {', '.join(kinds)}, but got {path}")


Bar = tuple[str, str, float, float, int]
"""(node id, job, from [s], to [s], workers)."""


def bars(report: SimulationReport) -> Iterator[Bar]:
    """Yield a bar (node id, job, from [s], to [s], workers) for each time a job spends on a node, sorted by end."""
    present: dict[tuple[str, str], tuple[float, int]] = {}
    for placed in report.placed:
        for node, job in [key for key in present if key[1] == placed.job]:
            since_s, workers = present[node, job]
            if placed.nodes.get(node) != workers:
                del present[node, job]
                yield node, job, since_s, placed.time_s, workers
        for node, workers in placed.nodes.items():
            present.setdefault((node, placed.job), (placed.time_s, workers))


def plot(reports: Sequence[SimulationReport], path: Path) -> None:
    """Draw each report's allocation: a row for each node, a lane for each of its GPUs, and time along the x axis.

    Each bar is the time a job spends on a node, as high as the number of GPUs it uses there. Jobs of one application
    share a hue and differ in shade. Bars that are large enough show the job number. The strip below shows GPUs in use
    and waiting jobs. Raises InputError if Matplotlib is not installed, or the file cannot be written.
    """
    check_picture(path)
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    heights = []
    for report in reports:
        heights += [0.7 + 0.32 * len(parse_cluster(report.cluster).nodes), 1.5]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(18, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for i, report in enumerate(reports):
        end_h = max(job.finish_s for job in report.jobs) / 3600
        _draw(report, axes[2 * i, 0], end_h)
        _draw_use(report, axes[2 * i + 1, 0], end_h)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"plot must be a picture file that can be written, but {path}: {error}") from error
    finally:
        plt.close(figure)


def _draw(report: SimulationReport, axis: Any, end_h: float) -> None:
    """Draw the times jobs spend on nodes, on an axis from 0 to ``end_h`` hours, with a title and a legend."""
    from matplotlib.patches import Patch

    nodes = parse_cluster(report.cluster).nodes
    rows = {node.node_id: i for i, node in enumerate(nodes)}
    sizes = {node.node_id: int(node.total["GPU"]) for node in nodes}
    colours = _shades(report)
    for bar, lanes in _lanes(report, sizes):
        node, job, start_s, end_s, _ = bar
        high = 0.9 / sizes[node]
        for lane, width in lanes:
            y = rows[node] - 0.45 + high * lane
            span = [(start_s / 3600, (end_s - start_s) / 3600)]
            axis.broken_barh(span, (y, high * width), facecolor=colours[job], edgecolor="white", linewidth=0.3)
            name = job.rsplit("-", 1)[-1]
            if 2 * width >= sizes[node] and (end_s - start_s) / 3600 > 0.006 * end_h * len(name):
                middle_h = (start_s + end_s) / 7200
                ink = "white" if sum(colours[job]) < 1.9 else "black"
                axis.text(middle_h, y + high * width / 2, name, ha="center", va="center", fontsize=6, color=ink)
    axis.set_yticks(list(rows.values()), list(rows), fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, end_h)
    axis.tick_params(labelbottom=False)
    about = f"{count(len(report.jobs), 'job')}, {count(report.gpus, 'GPU')}, {report.avg_jct_s / 3600:.2f} h on average"
    trace = "/".join(Path(report.trace).with_suffix("").parts[-2:])
    axis.set_title(f"{trace}: {report.policy} ({report.rules} rules), {about}", loc="left")
    apps = sorted({job.application for job in report.jobs})
    handles = [Patch(color=_hue(app, 0.5), label=app) for app in apps]
    axis.legend(
        handles=handles, fontsize=8, ncols=len(apps), loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False
    )


def _lanes(report: SimulationReport, sizes: Mapping[str, int]) -> Iterator[tuple[Bar, list[tuple[int, int]]]]:
    """Yield every bar with its GPU lanes as (first lane, number of lanes), contiguous if there is room."""
    busy: dict[str, list[tuple[float, frozenset[int]]]] = {node: [] for node in sizes}
    for bar in sorted(bars(report), key=lambda bar: (bar[2], bar[0], bar[1])):
        node, _, start_s, end_s, workers = bar
        busy[node] = [(until_s, lanes) for until_s, lanes in busy[node] if until_s > start_s]
        free = [lane for lane in range(sizes[node]) if not any(lane in lanes for _, lanes in busy[node])]
        runs = [free[i : i + workers] for i in range(len(free) - workers + 1)]
        taken = next((run for run in runs if run[-1] - run[0] == workers - 1), free[:workers])
        busy[node].append((end_s, frozenset(taken)))
        pieces: list[tuple[int, int]] = []
        for lane in taken:
            if pieces and sum(pieces[-1]) == lane:
                pieces[-1] = pieces[-1][0], pieces[-1][1] + 1
            else:
                pieces.append((lane, 1))
        yield bar, pieces


def _draw_use(report: SimulationReport, axis: Any, end_h: float) -> None:
    """Draw the number of GPUs in use, and the number of jobs that have arrived but hold none."""
    held: dict[str, int] = {}
    hours, used = [0.0], [0]
    for placed in report.placed:
        held[placed.job] = sum(placed.nodes.values())
        hours.append(placed.time_s / 3600)
        used.append(sum(held.values()))
    axis.fill_between(hours, used, step="post", color="0.75", linewidth=0)
    axis.set_ylim(0, report.gpus)
    axis.set_xlim(0, end_h)
    axis.set_ylabel("GPUs in use", fontsize=8)
    axis.set_xlabel("hours")
    twin = axis.twinx()
    times, waiting = _waiting(report)
    twin.step(times, waiting, where="post", color="tab:red", linewidth=1)
    twin.set_ylim(0, max(max(waiting), 1) * 1.1)
    twin.set_ylabel("jobs waiting", fontsize=8, color="tab:red")


def _waiting(report: SimulationReport) -> tuple[list[float], list[int]]:
    """Return times [h], and the number of jobs without a GPU from each time onwards."""
    steps = [(job.arrival_s, 1) for job in report.jobs]
    running: set[str] = set()
    ends = {job.job: job.finish_s for job in report.jobs}
    for placed in report.placed:
        runs = bool(placed.nodes)
        if runs and placed.job not in running:
            running.add(placed.job)
            steps.append((placed.time_s, -1))
        elif not runs and placed.job in running:
            running.remove(placed.job)
            steps += [(placed.time_s, 1)] if placed.time_s < ends[placed.job] else []
    times, counts = [0.0], [0]
    for time_s, step in sorted(steps):
        times.append(time_s / 3600)
        counts.append(counts[-1] + step)
    return times, counts


def _shades(report: SimulationReport) -> dict[str, tuple[float, float, float]]:
    seen: dict[str, int] = {}
    shades = {}
    for job in report.jobs:
        rank = seen[job.application] = seen.get(job.application, -1) + 1
        shades[job.job] = _hue(job.application, shade_of(rank))
    return shades


def _hue(application: str, shade: float) -> tuple[float, float, float]:
    """Return the application's colour; ``shade`` (0 to 1) varies its lightness."""
    return rgb(hue_of(application), shade)


def hue_of(application: str) -> int:
    """Return the palette index of the hue that all jobs of an application share."""
    return _HUES.get(application, sum(application.encode()))
