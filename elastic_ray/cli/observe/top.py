"""``elastic-ray top``: shows jobs and nodes repeatedly."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from elastic_ray.cli.listings import (
    NODE_COLUMNS,
    JobRow,
    NodeRow,
    job_rows,
    no_metric,
    node_cells,
    node_rows,
    with_metric,
)
from elastic_ray.cli.observe.top_lines import SORTS, TOP_COLUMNS, sorted_rows, top_cells, top_lines
from elastic_ray.cli.output import PHASE_STYLES, Seconds, metric_option, on_terminal, say
from elastic_ray.cli.overview import NO_ALLOCATOR, headline
from elastic_ray.cli.sweeps import grouped
from placement.text import plain_table


@click.command(short_help="Watch jobs and nodes.")
@click.option("--interval", default=2.0, show_default=True, type=Seconds(min=0.2, max=1e6), help="Seconds.")
@click.option("--once", is_flag=True, help="One look, then end; so it is in a pipe.")
@click.option(
    "--sort", "by", default="phase", show_default=True, type=click.Choice(list(SORTS)), help="Which jobs first."
)
@metric_option
def top(interval: float, once: bool, by: str, metric: str) -> None:
    """Watch nodes and as many jobs as fit on the terminal, until q or Ctrl-C is pressed.

    In a pipe, everything is printed once and in full. TRAINS is the share of the time since submission spent training.
    """
    from elastic_ray.cli import cluster

    cluster.connect()
    piped = not sys.stdout.isatty()
    screen = (_Pipe if piped or once else _Screen if on_terminal() else _Scroll)(by, metric)
    with contextlib.suppress(KeyboardInterrupt), _Keys(wanted=not piped) as keys, screen:
        for look in itertools.count():
            seen, silent = cluster.snapshot_if_any()
            rows = grouped(job_rows(cluster.known_jobs(), seen, (), cluster.ended_jobs()), ended=False)
            if (problem := no_metric(rows, metric)) and not look:
                raise click.ClickException(problem)
            nodes = node_rows(cluster.ray_nodes(), seen)
            heading = time.strftime("%H:%M:%S ") + (headline(seen) if seen is not None else silent or NO_ALLOCATOR)
            screen.show(heading, rows, nodes)
            if once or piped or keys.ended_within(interval):
                break


class _Pipe(contextlib.AbstractContextManager["_Pipe"]):
    """Output as plain text of any size, one update after the other."""

    def __init__(self, by: str = "phase", metric: str = "") -> None:
        self._by, self._metric = by, metric

    def __exit__(self, *error: object) -> None:
        return None

    def show(self, heading: str, jobs: Sequence[JobRow], nodes: Sequence[NodeRow]) -> None:
        """Print the jobs and nodes once."""
        now_s = time.time()
        say(heading)
        cells = [top_cells(row, now_s, self._metric) for row in sorted_rows(jobs, self._by)]
        say(plain_table(with_metric(TOP_COLUMNS, self._metric), cells))
        say(plain_table(NODE_COLUMNS, [node_cells(row) for row in nodes]) + "\n")


class _Scroll(_Pipe):
    """Output as plain text that fits the terminal, with each update below the previous one."""

    def show(self, heading: str, jobs: Sequence[JobRow], nodes: Sequence[NodeRow]) -> None:
        """Print the jobs and nodes once."""
        lines = top_lines(heading, jobs, nodes, size=_size(), by=self._by, now_s=time.time(), metric=self._metric)
        say("\n".join(line.text for line in lines) + "\n")


class _Screen(_Pipe):
    """Output that fills the entire terminal and is redrawn in place."""

    def __init__(self, by: str = "phase", metric: str = "") -> None:
        from rich.live import Live

        super().__init__(by, metric)
        self._live = Live(screen=True, auto_refresh=False)

    def __enter__(self) -> _Screen:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, heading: str, jobs: Sequence[JobRow], nodes: Sequence[NodeRow]) -> None:
        """Draw the jobs and nodes once."""
        from rich.console import Group
        from rich.text import Text

        lines = top_lines(heading, jobs, nodes, size=_size(), by=self._by, now_s=time.time(), metric=self._metric)
        styles = {"heading": "bold", **PHASE_STYLES}
        texts = [Text(each.text, style=styles.get(each.style, ""), no_wrap=True, overflow="crop") for each in lines]
        self._live.update(Group(*texts), refresh=True)


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return size.columns, size.lines


class _Keys(contextlib.AbstractContextManager["_Keys"]):
    """Reader of the key ``q`` without Enter, if standard input is a terminal; restores the terminal on exit.

    Args:
        wanted: False leaves the terminal alone, as another program in the pipe may be reading from it.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._before: list[Any] | None = None

    def __enter__(self) -> _Keys:
        if not self._wanted or sys.stdin.closed or not sys.stdin.isatty():
            return self
        try:
            import termios
            import tty
        except ImportError:  # another system's terminals
            return self
        with contextlib.suppress(termios.error):  # a terminal that is gone
            self._before = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)

    def ended_within(self, seconds: float) -> bool:
        """Wait for ``seconds``; return True at once if ``q`` is pressed or the terminal is gone."""
        if self._before is None:
            time.sleep(seconds)
            return False
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            ready, _, _ = select.select([sys.stdin.fileno()], [], [], left_s)
            if ready and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
                return True
        return False
