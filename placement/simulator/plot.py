"""The allocation over time: a row for each node, bars coloured by job."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from placement.simulator.errors import InputError
from placement.simulator.report import Report

_COLOURS = {"cifar10": 0.60, "ncf": 0.45, "deepspeech2": 0.33, "bert": 0.13, "yolov3": 0.0, "imagenet": 0.80}


def require_matplotlib() -> None:
    """Raise an error that says how to install it, unless Matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs Matplotlib; install it with: pip install 'elastic-ray[plot]'")


def bars(report: Report) -> Iterator[tuple[str, str, float, float, int]]:
    """(node id, job, from [s], to [s], workers) of every stay of a job on a node, in the order of its end."""
    present: dict[tuple[str, str], tuple[float, int]] = {}
    for placed in report.placed:
        for node, job in [key for key in present if key[1] == placed.job]:
            since_s, workers = present[node, job]
            if placed.nodes.get(node) != workers:
                del present[node, job]
                yield node, job, since_s, placed.time_s, workers
        for node, workers in placed.nodes.items():
            present.setdefault((node, placed.job), (placed.time_s, workers))


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw one panel per report: nodes downwards, time rightwards, each bar as high as the job's share of the node.

    Bars of one application have one hue, its jobs several shades.

    Raises:
        InputError: Matplotlib is missing, or the file cannot be written.
    """
    require_matplotlib()
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    height = 1.2 + 0.16 * max((len(_nodes(report)) for report in reports), default=1)
    figure, axes = plt.subplots(len(reports), 1, figsize=(14, height * len(reports)), squeeze=False)
    for report, axis in zip(reports, axes[:, 0], strict=True):
        _draw(report, axis)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"plot must be a picture file that can be written, but {path}: {error}") from error
    finally:
        plt.close(figure)


def _draw(report: Report, axis: Any) -> None:
    from matplotlib.patches import Patch

    nodes = {node: i for i, node in enumerate(_nodes(report))}
    colours = _shades(report)
    lanes: dict[str, list[tuple[float, int, int]]] = {node: [] for node in nodes}
    size = max((workers for *_, workers in bars(report)), default=1)
    for node, job, start_s, end_s, workers in sorted(bars(report), key=lambda bar: bar[2]):
        busy = [(lane, width) for until_s, lane, width in lanes[node] if until_s > start_s]
        lane = _free_lane(busy, workers)
        lanes[node].append((end_s, lane, workers))
        y = nodes[node] - 0.45 + 0.9 * lane / size
        axis.broken_barh(
            [(start_s / 3600, (end_s - start_s) / 3600)], (y, 0.9 * workers / size), color=colours[job], linewidth=0
        )
    axis.set_yticks(list(nodes.values()), list(nodes), fontsize=6)
    axis.set_ylim(len(nodes) - 0.5, -0.5)
    axis.set_xlim(0, None)
    axis.set_xlabel("hours")
    average_h = report.avg_jct_s / 3600
    axis.set_title(f"{Path(report.trace).stem}: {report.policy} ({report.rules} rules), {average_h:.2f} h on average")
    apps = sorted({job.application for job in report.jobs})
    axis.legend(
        handles=[Patch(color=_hue(app, 0.75), label=app) for app in apps],
        fontsize=6,
        ncols=len(apps),
        loc="lower right",
    )


def _free_lane(busy: Sequence[tuple[int, int]], workers: int) -> int:
    """The lowest GPU from which so many are free."""
    lane = 0
    for start, width in sorted(busy):
        if start - lane >= workers:
            break
        lane = max(lane, start + width)
    return lane


def _nodes(report: Report) -> list[str]:
    return sorted({node for placed in report.placed for node in placed.nodes})


def _shades(report: Report) -> dict[str, tuple[float, float, float]]:
    seen: dict[str, int] = {}
    shades = {}
    for job in report.jobs:
        rank = seen[job.application] = seen.get(job.application, -1) + 1
        shades[job.job] = _hue(job.application, 0.45 + 0.5 * ((rank * 0.618) % 1.0))
    return shades


def _hue(application: str, value: float) -> tuple[float, float, float]:
    import colorsys

    hue = _COLOURS.get(application, sum(application.encode()) % 97 / 97)
    return colorsys.hsv_to_rgb(hue, 0.65, value)
