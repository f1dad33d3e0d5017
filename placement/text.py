"""Text from others (names, metrics, exceptions, reasons), made safe for a terminal or a log (pure).

Characters that a terminal would act on instead of showing are shown as Python writes them: escape sequences as
``\\x1b``, marks that reverse or hide text (U+202E, U+200B...) as ``\\u202e``.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

_OURS = ("elastic_ray", "placement", "tuning")
_LONG_ID = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{24,56}\b")
_ID_LENGTH = 8
_NAME_LENGTH = 24


def printable(text: str) -> str:
    """Return the text on one line: white space becomes single spaces, and unprintable characters are escaped."""
    return _escaped(" ".join(text.split()))


def printable_lines(text: str) -> str:
    """Return the text with unprintable characters escaped, keeping line breaks and indentation."""
    return "\n".join(_escaped(line) for line in text.split("\n"))


def printable_json(text: str) -> str:
    """Return JSON text with unprintable characters, which only strings can contain, escaped as in JSON."""
    return "".join(each if each.isprintable() or each == "\n" else _json_escape(each) for each in text)


def short_ids(text: str) -> str:
    """Return the text with Ray's long hex ids shortened to their first characters."""
    return _LONG_ID.sub(lambda found: found[0][:_ID_LENGTH], text)


def clipped(text: str, most: int = 500) -> str:
    """Return the text with Ray's long hex ids shortened, truncated to ``most`` characters."""
    short = short_ids(text[: 4 * most])
    return short if len(short) <= most else f"{short[: most - 1]}…"


def short_name(name: str) -> str:
    """Return the name with its middle cut out if it is long; a short name is unchanged."""
    if len(name) <= _NAME_LENGTH:
        return name
    head = (_NAME_LENGTH - 2) // 2
    return f"{name[:head]}..{name[len(name) - (_NAME_LENGTH - 2 - head) :]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    # A text of the user's own class would have to be imported to be read: str's own methods give none.
    return str.strip(str(error)).split("\n", 1)[0] or type(error).__name__


def one_line(error: BaseException) -> str:
    """Return Ray's explanation of an error on one line: its first line says what happened, its last line why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int | None = None) -> str:
    """Return a table as text with columns two spaces apart: the first ``left`` (None: all) aligned on the left.

    No line is cut, so that other programs can read the table.
    """
    lines = [tuple(columns), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [">" if left is not None and i >= left else "<" for i in range(len(widths))]
    padded = (zip(line, sides, widths, strict=True) for line in lines)
    return "\n".join("  ".join(f"{cell:{side}{width}}" for cell, side, width in line).rstrip() for line in padded)


def count(number: int, noun: str = "worker") -> str:
    """Return text such as ``1 worker`` or ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ago(seconds: float) -> str:
    """Return a duration in its two largest units: ``42s``, ``3m05s``, ``2h10m``, ``3d04h``; empty if not finite."""
    if not math.isfinite(seconds):
        return ""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


class PrintableFormatter(logging.Formatter):
    """Log formatter that escapes unprintable characters in this package's records; others are unchanged."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as ``logging`` does, with unprintable characters escaped."""
        if record.name.partition(".")[0] not in _OURS:
            return super().format(record)
        plain = logging.makeLogRecord({**record.__dict__, "msg": printable(record.getMessage()), "args": None})
        return printable_lines(super().format(plain))


def log_plainly(level: int) -> None:
    """Configure this process's log as printable lines on standard error, unless logging is already configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(level=level, handlers=[handler])


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\t" else _escape(each) for each in text)


def _escape(character: str) -> str:
    if unicodedata.category(character) == "Zs":  # a space of another width
        return " "
    return character.encode("unicode_escape").decode("ascii")


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def describe(bundle: Mapping[str, float]) -> str:
    """Return a resource bundle as readable text, such as ``1 CPU + 2 GPU``."""
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount > 0)
