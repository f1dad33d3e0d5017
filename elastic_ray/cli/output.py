"""Output of commands as tables and JSON, coloured on a terminal, plain elsewhere (pure except for printing)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from elastic_ray.driver.overrides import parse_workers
from placement.reasons import Reason
from placement.text import plain_table, printable, printable_json, printable_lines

if TYPE_CHECKING:
    from rich.table import Table

PHASE_STYLES = {
    "sweep": "green",
    "running": "green",
    "finished": "green",
    "failed": "red",
    "waiting": "yellow",
    "paused": "yellow",
    "starting": "yellow",
}
_STYLES = {**PHASE_STYLES, "ok": "green", "warn": "yellow", "fail": "red", "draining": "red"}


def say(text: str, *, err: bool = False) -> None:
    """Print text with control characters escaped, so that text from others cannot control the terminal."""
    click.echo(printable_lines(text), err=err)


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table fitted to the terminal's width, with each cell that has a state shown in that state's colour."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        last = number == len(columns) - 1
        table.add_column(column, header_style="bold", no_wrap=not last, overflow="fold" if last else "ellipsis")
    for row in rows:
        table.add_row(*(Text(printable(cell), style=_STYLES.get(cell, "")) for cell in row))
    return table


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print a table, or the text ``empty`` if it has no rows."""
    if not rows:
        say(empty)
    elif not on_terminal():
        click.echo(plain_table(columns, rows))
    else:
        from rich.console import Console

        Console().print(rich_table(columns, rows))


def show_json(value: Any) -> None:
    """Print a value as indented JSON, with fields in their declared order."""
    click.echo(to_json(value))


def to_json(value: Any) -> str:
    """Convert dataclasses, mappings, sequences and numbers to JSON; any other value becomes text."""
    return printable_json(json.dumps(_plain(value), indent=2, allow_nan=False, ensure_ascii=False))


def _plain(value: Any) -> Any:
    """Convert a nested value to plain JSON; values that JSON cannot represent become text."""
    if isinstance(value, Reason):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | str) or value is None:
        return getattr(value, "value", value)
    try:
        number = float(value)  # of NumPy or torch
    except (TypeError, ValueError, RuntimeError):
        return str(value)
    return number if math.isfinite(number) else None  # JSON knows no other numbers


def on_terminal() -> bool:
    """True if output may be coloured and fitted to a width: on a terminal, without NO_COLOR or TERM=dumb."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


class Seconds(click.FloatRange):
    """Number of seconds within a range; unlike in ``click.FloatRange``, nan is in no range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raises a usage error if it is not one, or not in the range."""
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"must be a number of seconds, but got {value!r}", param, ctx)
        return found


metric_option = click.option(
    "--metric", default="", metavar="NAME", help="Show this reported metric, such as eval/loss."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, with all there is.")
job_argument = click.argument("job")


def read_workers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse ``4`` or ``1:8`` as (min, max); raises a usage error for any other text."""
    try:
        return None if value is None else parse_workers(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def read_size(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """Parse a number of workers, at least 1; ``auto`` gives None."""
    if value == "auto":
        return None
    if not re.fullmatch("0*[1-9][0-9]{0,8}", value):
        raise click.BadParameter(
            f"must be a number of workers from 1, or auto to leave it to the allocator, but got {value!r}", ctx, param
        )
    return int(value)
