"""What others have named or said, on its way to a terminal or a log."""

from __future__ import annotations

import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.allocator.explaining import Explanation
from placement.allocator.snapshot import DecisionRecord
from placement.reasons import Cause, Reason
from placement.text import PrintableFormatter, printable, printable_json, printable_lines, short_ids, short_name


@pytest.mark.parametrize(
    "text, shown",
    [
        ("bert-large: 4 -> 8 workers, größer 模型", "bert-large: 4 -> 8 workers, größer 模型"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("one\r\ntwo\u2028three\tfour", "one two three four"),
        ("\u202eevil\u2066\u200b\ufeff", "\\u202eevil\\u2066\\u200b\\ufeff"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("\U000e0001", "\\U000e0001"),
        ("\ud800", "\\ud800"),
        ("[red]no markup[/red]", "[red]no markup[/red]"),
    ],
)
def test_what_cannot_be_printed_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_one_line_is_printable_and_stays_as_it_is(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and printable(shown) == shown
    lines = printable_lines(text)
    assert lines.count("\n") == text.count("\n") and all(c.isprintable() or c in "\n\t" for c in lines)


@given(st.text())
def test_json_is_the_same_value(text: str) -> None:
    shown = printable_json(json.dumps({"a": text}, indent=2, ensure_ascii=False))
    assert json.loads(shown) == {"a": text} and all(c.isprintable() or c == "\n" for c in shown)


def test_ids_and_names_are_shortened() -> None:
    assert short_ids(f"node {'a7674fc5' * 7} drains") == "node a7674fc5 drains"
    assert short_ids("defaced facade at step 123456789012345678901234567890 of w12").startswith("defaced facade")
    assert short_name("bert") == "bert" and len(short_name("x" * 100)) == 24


def test_our_log_is_one_line_a_record_others_theirs() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter())
    ours, others = logging.getLogger("placement.test_text"), logging.getLogger("users.own")
    for logger in (ours, others):
        logger.addHandler(handler)
        logger.propagate = False
    ours.warning("job %s", "\x1b[1m\n", exc_info=ValueError("\x1b[2J"))
    others.warning("two\nlines")
    assert stream.getvalue() == "job \\x1b[1m\nValueError: \\x1b[2J\ntwo\nlines\n"


def test_sentences_of_the_allocator_are_printable() -> None:
    bad = "\x1b[31m\nx"
    record = DecisionRecord(
        time_s=0.0,
        trigger="arrival",
        job=bad,
        from_workers=0,
        to_workers=1,
        nodes={"n": 1},
        reason=Reason(Cause.PAUSED, (bad,)),
    )
    why = Explanation(
        job=bad,
        nodes={"ab" * 28: 1},
        reason=bad,
        figures=bad,
        speed=1.0,
        speed_with_one_more=None,
        taker=bad,
        with_room=bad,
    )
    assert str(record).isprintable()
    assert all(line.isprintable() for line in str(why).splitlines()) and len(str(why).splitlines()) == 4
