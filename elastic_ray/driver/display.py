"""Progress display of a running job: pure functions that format lines, and a display for terminals and logs."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus, Report
from placement.text import ago, count, printable, short_ids, short_name

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

PLAIN_INTERVAL_S = 5.0
_MOST_METRICS = 4
_MOST_EPOCHS = 100


def event_line(job: str, event: JobEvent) -> str:
    """Return an event as one line, e.g. ``job a1: 2 -> 4 workers, goodput: +1 gains 0.31, pause 0.18 s``."""
    if event.from_workers != event.to_workers:
        what = f"{event.from_workers} -> {count(event.to_workers)}"
        if event.kind not in (EventKind.RESIZE, EventKind.STARTED):
            what = f"{event.kind.value.replace('_', ' ')}, {what}"
    else:
        what = event.kind.value.replace("_", " ")
    parts = [what, event.reason.strip().rstrip(".")]
    if event.pause_s > 0:
        parts.append(f"pause {event.pause_s:.2f} s")
    return _line(job, parts)


def report_line(job: str, report: Report, epochs: int | None) -> str:
    """Return one line for an epoch's final report: ``job a1: epoch 3/30 done, loss 0.231, accuracy 0.94``."""
    of = "" if epochs is None else f"/{epochs}"
    told = [f"{name} {value}" for name, value in list(_numbers(report.metrics).items())[:_MOST_METRICS]]
    return _line(job, [f"epoch {report.epochs_done}{of} done", *told])


def _line(job: str, parts: Iterable[str]) -> str:
    """Return one line about a job, with long ids shortened and unprintable characters in user-supplied text escaped."""
    return short_ids(printable(f"job {short_name(job)}: " + ", ".join(part for part in parts if part)))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the numeric metrics, formatted, with the loss first."""
    values: dict[str, str] = {}
    for name in sorted(metrics, key=lambda name: name != "loss"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if not isinstance(metrics[name], str | bool):
                values[printable(str(name))] = f"{float(metrics[name]):.4g}"  # also NumPy's
    return values


def status_fields(status: JobStatus) -> dict[str, str]:
    """Return the known fields of a status as text, keyed by column title; fields not worth showing are left out."""
    fields = {"workers": _workers(status)}
    if status.batch_size > 0:
        fields["batch"] = f"{status.batch_size}"
    if status.tokens_per_s:
        fields["tokens/s"] = _number(status.tokens_per_s)
    elif status.throughput > 0:
        fields["samples/s"] = _number(status.throughput)
    if status.goodput is not None:
        fields["goodput"] = _number(status.goodput)
    if status.phase not in (JobPhase.WAITING, JobPhase.STARTING, JobPhase.PAUSED):
        of = "" if status.epochs is None else f"/{status.epochs}"
        fields["epoch"] = f"{status.epoch}{of}"
        fields["step"] = f"{status.step}"
    if status.progress is not None and not status.phase.ended:
        fields["done"] = f"{status.progress:.0%}"
    if status.eta_s is not None and (left := ago(status.eta_s)):
        fields["ETA"] = left
    texts, name = _numbers(status.metrics), printable(status.metric)
    for shown in [each for each in (name, *texts) if each in texts][:1]:
        fields.setdefault(shown, texts[shown])
    if status.cost_usd is not None:
        fields["USD"] = f"{status.cost_usd:.3g}"
    return fields


def status_line(status: JobStatus) -> str:
    """Return a status as one line: ``job a1: running, workers 4, batch 512, samples/s 8.3k, epoch 2/30``."""
    fields = status_fields(status)
    if status.phase.ended:
        del fields["workers"]
    parts = [status.phase.value, *(f"{name} {text}" for name, text in fields.items())]
    parts += [text.strip().rstrip(".") for text in (status.message, status.note) if text]
    return _line(status.job, parts)


def _workers(status: JobStatus) -> str:
    if status.workers == status.target_workers or status.phase.ended:
        return f"{status.workers}"
    return f"{status.workers} -> {status.target_workers}"


def _number(value: float) -> str:
    """Format a number with three significant digits, and thousands as k."""
    return f"{value / 1000:.3g}k" if value >= 1000 else f"{value:.3g}"


class JobDisplay:
    """Context manager that shows a live line and events on a terminal, else plain lines; its errors stop no job."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        interval_s: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a display, which shows nothing until its first method call."""
        self._stream = sys.stdout if stream is None else stream
        self._interval_s, self._clock = interval_s, clock
        self._shown: tuple[float, str] | None = None
        self._epochs_shown = 0
        self._works = True
        self._live = _live(self._stream) if _is_terminal(self._stream) else None

    def __enter__(self) -> JobDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def event(self, job: str, event: JobEvent) -> None:
        """Show an event at once, except when the job ends, which the last status shows."""
        if event.kind is not EventKind.FINISHED:
            self._write(event_line(job, event))

    def report(self, job: str, report: Report, epochs: int | None) -> None:
        """Show the report if it is an epoch's first; in long runs, only for about 100 evenly spaced epochs."""
        every = max(1, math.ceil((epochs or 0) / _MOST_EPOCHS))
        done = report.epochs_done
        if done >= self._epochs_shown + every or (done > self._epochs_shown and done == epochs):
            self._epochs_shown = done
            self._write(report_line(job, report, epochs))

    def status(self, status: JobStatus) -> None:
        """Show a status: at once on a terminal; elsewhere only if it has changed and the last line is old enough."""
        if self._live is not None:
            self._live.update(_table(status), refresh=True)
            return
        line, now = status_line(status), self._clock()
        due = self._shown is None or now - self._shown[0] >= self._interval_s
        if (due or status.phase.ended) and (self._shown is None or self._shown[1] != line):
            self._shown = now, line
            self._write(line)

    def results(self, job: str, folder: str) -> None:
        """Show the folder with the results of a job that has ended."""
        self._write(f"{_line(job, [])} results in {printable(folder)}")

    def close(self) -> None:
        """End the display, leaving the last state on the screen, and release the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write(self, line: str) -> None:
        """Write a line; if the stream is closed, stop displaying without raising."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
            return
        if not self._works:
            return
        try:
            print(line, file=self._stream, flush=True)
        except (OSError, ValueError):  # closed pipe or stream: the job continues unseen
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
    """Return a one-row table of the job, its phase, and the fields of :func:`status_fields`."""
    from rich.table import Table
    from rich.text import Text

    cells = {"job": short_name(status.job), "phase": status.phase.value, **status_fields(status)}
    if said := "; ".join(filter(None, (status.message, status.note))):
        cells["message"] = said
    table = Table(box=None, pad_edge=False)
    for column in cells:
        table.add_column(Text(column), header_style="dim")
    table.add_row(*(Text(printable(text)) for text in cells.values()))
    return table


class Interrupts:
    """Context manager that remembers a Ctrl-C even if a callback or destructor swallows the KeyboardInterrupt.

    It does nothing outside the main thread, or if the program has its own SIGINT handler.
    """

    def __init__(self) -> None:
        self._seen = self._handles = False

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._handles = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        signal.default_int_handler(number, frame)

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user has pressed Ctrl-C."""
        if self._seen:
            raise KeyboardInterrupt


def without_traceback(error: BaseException) -> None:
    """Prevent Python from printing a traceback if this exception is not caught, as its meaning was printed already."""
    show = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            show(kind, raised, trace)

    sys.excepthook = hook
