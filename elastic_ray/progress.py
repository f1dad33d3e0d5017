"""What a job shows while it runs: pure lines of text, and a thin display for a terminal or a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

PLAIN_INTERVAL_S = 5.0


def event_line(job: str, event: JobEvent) -> str:
    """An event as a sentence, e.g. ``job a1: 2 -> 4 workers, goodput: +1 gains 0.31, pause 0.18 s``."""
    if event.from_workers != event.to_workers:
        what = f"{event.from_workers} -> {event.to_workers} workers"
        if event.kind not in (EventKind.RESIZE, EventKind.STARTED):
            what = f"{event.kind.value.replace('_', ' ')}, {what}"
    else:
        what = event.kind.value.replace("_", " ")
    parts = [what, event.reason.strip().rstrip(".")]
    if event.pause_s > 0:
        parts.append(f"pause {event.pause_s:.2f} s")
    return f"job {job}: " + ", ".join(part for part in parts if part)


def status_fields(status: JobStatus) -> dict[str, str]:
    """What is worth showing of a status, by column; unknown values are left out."""
    fields = {"workers": _workers(status)}
    if status.batch_size > 0:
        fields["batch"] = f"{status.batch_size}"
    if status.throughput > 0:
        fields["samples/s"] = _number(status.throughput)
    if status.goodput is not None:
        fields["goodput"] = _number(status.goodput)
    if status.phase not in (JobPhase.WAITING, JobPhase.STARTING):
        of = "" if status.epochs is None else f"/{status.epochs}"
        fields["epoch"] = f"{status.epoch}{of}"
        fields["step"] = f"{status.step}"
    loss = status.metrics.get("loss")
    if isinstance(loss, int | float):
        fields["loss"] = f"{loss:.4g}"
    if status.cost_usd is not None:
        fields["USD"] = f"{status.cost_usd:.3g}"
    return fields


def status_line(status: JobStatus) -> str:
    """A status as one line: ``job a1: running, workers 4, batch 512, samples/s 8.3k, epoch 2/30``."""
    parts = [status.phase.value, *(f"{name} {text}" for name, text in status_fields(status).items())]
    parts += [text.strip().rstrip(".") for text in (status.message, status.note) if text]
    return f"job {status.job}: " + ", ".join(parts)


def _workers(status: JobStatus) -> str:
    if status.workers == status.target_workers or status.phase.ended:
        return f"{status.workers}"
    return f"{status.workers} -> {status.target_workers}"


def _number(value: float) -> str:
    """Three significant digits, thousands as k."""
    return f"{value / 1000:.3g}k" if value >= 1000 else f"{value:.3g}"


class Progress:
    """Shows statuses and events: a live line with events above it on a terminal, plain lines elsewhere.

    A context manager; nothing it does may stop a job, so a broken stream only ends the display.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        interval_s: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a display; it shows nothing before the first call.

        Args:
            stream: where to write, ``sys.stdout`` if None.
            interval_s: least time between two plain status lines [s].
            clock: seconds, monotonic.
        """
        self._stream = sys.stdout if stream is None else stream
        self._interval_s = interval_s
        self._clock = clock
        self._shown: tuple[float, str] | None = None
        self._works = True
        self._live = _live(self._stream) if _is_terminal(self._stream) else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def event(self, job: str, event: JobEvent) -> None:
        """Show an event, now."""
        self._write(event_line(job, event))

    def status(self, status: JobStatus) -> None:
        """Show a status: at once on a terminal; elsewhere if it is news and the last line is old enough."""
        if self._live is not None:
            self._live.update(_table(status), refresh=True)
            return
        line, now = status_line(status), self._clock()
        due = self._shown is None or now - self._shown[0] >= self._interval_s
        if (due or status.phase.ended) and (self._shown is None or self._shown[1] != line):
            self._shown = now, line
            self._write(line)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
            return
        if not self._works:
            return
        try:
            print(line, file=self._stream, flush=True)
        except (OSError, ValueError):  # closed pipe or stream: the job goes on unseen
            self._works = False


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _live(stream: TextIO) -> Live:
    from rich.console import Console
    from rich.live import Live

    live = Live(console=Console(file=stream), auto_refresh=False, transient=False)
    live.start()
    return live


def _table(status: JobStatus) -> Table:
    """One row: the job, its phase, then what :func:`status_fields` knows."""
    from rich.markup import escape
    from rich.table import Table

    cells = {"job": status.job, "phase": status.phase.value, **status_fields(status)}
    if said := "; ".join(filter(None, (status.message, status.note))):
        cells["message"] = said
    table = Table(box=None, pad_edge=False)
    for column in cells:
        table.add_column(column, header_style="dim")
    table.add_row(*(escape(text) for text in cells.values()))
    return table
