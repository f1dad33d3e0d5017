"""Lines of ``elastic-ray top``, cut to fit a terminal (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size

from elastic_ray.cli.listings import (
    NODE_COLUMNS,
    JobRow,
    NodeRow,
    job_cells,
    node_cells,
    percent,
    until_end,
    with_metric,
)
from placement.text import ago, printable

TOP_COLUMNS = ("JOB", "PHASE", "WORKERS", "DONE", "ETA", "SAMPLES/S", "BATCH", "METRIC", "TRAINS", "AGE", "WHY")
_FROM_JOBS = {"JOB": 0, "PHASE": 1, "WORKERS": 2, "BATCH": 4, "SAMPLES/S": 5, "METRIC": 10}
_MOST_FIRST = 24  # columns of a name
_LEAST_LAST = 8  # columns of the last cell, which is cut to the room there is
_GAP = 2
_ORDER = (
    *("sweep", "running", "starting", "waiting", "paused", "silent", "submitted", "script"),
    *("failed", "stopped", "finished"),
)
_NODES_FROM = 12  # lines of a terminal that has room for nodes

_Key = Callable[[JobRow], tuple[float | str, ...]]
_FAR = math.inf

SORTS: dict[str, _Key] = {
    "phase": lambda row: (_phase(row), -row.workers),
    "workers": lambda row: (-row.workers,),
    "done": lambda row: (-_known(row.progress, -1.0),),
    "eta": lambda row: (_known(row.eta_s, _FAR),),
    "age": lambda row: (_known(row.submitted_s, _FAR),),
    "name": lambda row: (),
}
"""What jobs may be sorted by; their names come last."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopLine:
    """Line of text in ``elastic-ray top``, with its style."""

    text: str  # printable, no wider than the terminal
    style: str = ""  # a job's phase, "heading", or empty


def _phase(row: JobRow) -> int:
    return _ORDER.index(row.phase) if row.phase in _ORDER else len(_ORDER)


def _known(value: float | None, otherwise: float) -> float:
    return value if value is not None and math.isfinite(value) else otherwise


def sorted_rows(rows: Sequence[JobRow], by: str) -> list[JobRow]:
    """Return the rows sorted by a key of ``SORTS``, such as "eta"; ties are sorted by job name."""
    return sorted(rows, key=lambda row: (*SORTS[by](row), row.job))


def top_cells(row: JobRow, now_s: float, metric: str = "") -> tuple[str, ...]:
    """Return the texts of a job's table row, in the order of ``TOP_COLUMNS``."""
    cells = job_cells(row, now_s, metric)
    texts = {name: cells[number] for name, number in _FROM_JOBS.items()}
    why = cells[-1]
    if row.waits_for:
        start = f", about {ago(row.start_s)}" if row.start_s is not None and math.isfinite(row.start_s) else ""
        why = f"waits for {row.waits_for}{start}; {why}".rstrip("; ")
    age = ago(now_s - row.submitted_s) if row.submitted_s is not None else ""
    texts |= {"DONE": percent(row.progress), "ETA": until_end(row), "TRAINS": percent(row.productive_share)}
    texts |= {"AGE": age, "WHY": why}
    return tuple(texts[name] for name in TOP_COLUMNS)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the header and rows as lines of at most ``width`` characters, with as many leading columns as fit."""
    lines = [tuple(columns), *(tuple(printable(cell) for cell in row) for row in rows)]
    widths = [max(cell_len(line[i]) for line in lines) for i in range(len(columns))]
    shown = [min(widths[0], _MOST_FIRST, max(1, width - (_GAP + _LEAST_LAST)) if width < 3 * _MOST_FIRST else width)]
    for each in widths[1:-1]:
        if sum(shown) + _GAP * len(shown) + each > width:
            break
        shown.append(each)
    rest = width - sum(shown) - _GAP * len(shown)
    complete = len(shown) == len(columns) - 1 and rest >= _LEAST_LAST
    if complete:
        shown.append(min(widths[-1], rest))
    return [
        (" " * _GAP).join(set_cell_size(cell, size) for cell, size in zip(line, shown, strict=False)).rstrip()
        for line in lines
    ]


def top_lines(
    heading: str,
    jobs: Sequence[JobRow],
    nodes: Sequence[NodeRow],
    *,
    size: tuple[int, int],
    by: str = "phase",
    now_s: float = 0.0,
    metric: str = "",
) -> list[TopLine]:
    """Return the lines of one screen update: a heading, the first jobs in order, and nodes if there is room.

    Args:
        size: Width and height of the terminal [characters]. Jobs are sorted ``by`` this key of ``SORTS``.
        metric: Metric to show; empty for each job's own.
    """
    width, height = max(1, size[0]), max(1, size[1])
    below = min(len(nodes) + 2, height // 3) if height >= _NODES_FROM and nodes else 0
    room = height - 2 - below  # the heading, and the columns' names
    rows = sorted_rows(jobs, by)
    shown = rows if len(rows) <= room else rows[: max(0, room - 1)]
    first, *others = table_lines(
        with_metric(TOP_COLUMNS, metric), [top_cells(row, now_s, metric) for row in shown], width
    )
    lines = [TopLine(text=_cut(printable(heading), width), style="heading"), TopLine(text=first, style="heading")]
    lines += [TopLine(text=text, style=row.phase) for text, row in zip(others, shown, strict=True)]
    if len(shown) < len(rows):
        lines.append(TopLine(text=_cut(f"and {len(rows) - len(shown)} more", width)))
    if below:
        cells = [node_cells(node) for node in nodes[: below - 2]]
        first, *others = table_lines(NODE_COLUMNS, cells, width)
        lines += [TopLine(text=""), TopLine(text=first, style="heading"), *(TopLine(text=text) for text in others)]
    return lines[:height]


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width).rstrip()
