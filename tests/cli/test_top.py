"""What ``top`` and ``status`` make of their rows: lines that fit, whatever the rows hold."""

from __future__ import annotations

import dataclasses
import math
import os
import pty
import select
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from elastic_ray.cli.listings import JobRow, NodeRow, outlook_lines, until_end
from elastic_ray.cli.observe.top_lines import SORTS, sorted_rows, table_lines, top_lines
from elastic_ray.events import Pause

NODE = NodeRow(
    node_id="ab" * 14,
    address="10.0.0.1",
    total={"CPU": 8.0},
    free=None,
    draining=False,
    gpu_type="",
    market="",
    jobs={},
    labels={},
)
NUMBERS = st.none() | st.floats()
ROWS = st.builds(
    JobRow,
    job=st.text(max_size=40),
    phase=st.sampled_from(["running", "waiting", "failed", "silent", "script", "?"]),
    workers=st.integers(0, 10_000),
    progress=NUMBERS,
    eta_s=NUMBERS,
    eta_low_s=NUMBERS,
    eta_high_s=NUMBERS,
    productive_share=NUMBERS,
    waiting_s=st.floats(),
    start_s=NUMBERS,
    submitted_s=NUMBERS,
    goodput=NUMBERS,
    throughput=st.floats(),
    waits_for=st.text(max_size=20),
    message=st.text(max_size=60),
    last_pause=st.none() | st.builds(Pause, vote_s=st.floats()),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ROWS, max_size=4), st.integers(1, 200), st.integers(1, 30), st.sampled_from(sorted(SORTS)))
def test_any_rows_fit_any_terminal_and_cannot_steer_it(rows: list[JobRow], width: int, height: int, by: str) -> None:
    lines = top_lines("12:00 \x1b[2J policy", rows, [NODE] * 5, size=(width, height), by=by, now_s=1e9)
    assert len(lines) <= height
    for line in lines:
        assert cell_len(line.text) <= width and line.text.isprintable()
    for row in rows:
        assert all(isinstance(line, str) for line in outlook_lines(row))


def test_thousand_jobs_show_the_first_and_how_many_more() -> None:
    rows = [JobRow(job=f"job-{n:04d}", phase="waiting" if n % 2 else "running", workers=n) for n in range(1000)]
    begun = time.process_time()
    texts = [line.text for line in top_lines("now", rows, [NODE] * 9, size=(100, 30))]
    assert time.process_time() - begun < 0.5
    assert len(texts) == 30 and texts[2].startswith("job-0998  running")
    assert "and 983 more" in texts and sum(text.startswith("job-") for text in texts) == 17
    assert texts[-9].startswith("NODE")


def test_twenty_columns_show_name_and_phase() -> None:
    rows = [JobRow(job="a-job-with-a-long-name", phase="running", workers=2), JobRow(job="b\x1b[31m", phase="waiting")]
    first, *others = [line.text for line in top_lines("12:00:00 policy goodput; 2 jobs", rows, [], size=(20, 24))][1:]
    assert first == "JOB         PHASE"
    assert others == ["a-job-with  running", "b\\x1b[31m   waiting"]


def test_cells_between_first_and_last_are_whole_or_absent() -> None:
    columns, rows = ("NAME", "MIDDLE", "LAST"), [("a", "123456", "a long sentence of many words")]
    assert table_lines(columns, rows, 24) == ["NAME  MIDDLE  LAST", "a     123456  a long sen"]
    assert table_lines(columns, rows, 15) == ["NAME  MIDDLE", "a     123456"]
    assert table_lines(columns, rows, 11) == ["N", "a"] or table_lines(columns, rows, 11)[0].startswith("N")


@pytest.mark.parametrize(
    "by, first",
    [("phase", "slow"), ("workers", "big"), ("done", "far"), ("eta", "soon"), ("age", "old"), ("name", "big")],
)
def test_jobs_are_sorted_as_asked_unknown_values_last(by: str, first: str) -> None:
    rows = [
        JobRow(job="far", phase="waiting", progress=0.9, submitted_s=50.0),
        JobRow(job="soon", phase="waiting", eta_s=1.0, progress=math.nan, submitted_s=60.0),
        JobRow(job="old", phase="waiting", eta_s=math.nan, submitted_s=1.0),
        JobRow(job="big", phase="waiting", workers=9),
        JobRow(job="slow", phase="running", workers=1, eta_s=99.0),
    ]
    assert sorted_rows(rows, by)[0].job == first


def test_status_says_what_is_left_and_where_time_went() -> None:
    row = JobRow(
        job="a",
        phase="running",
        progress=0.42,
        eta_s=185.0,
        eta_low_s=130.0,
        eta_high_s=240.0,
        samples_left=12345,
        tokens_left=790080,
        steps_left=500,
        training_s=80.0,
        starting_s=5.0,
        waiting_s=15.0,
        last_pause=Pause(vote_s=0.01, group_s=0.05, state_s=0.12, first_step_s=0.3),
    )
    assert outlook_lines(row) == (
        "42% done; left: 3m05s (2m10s to 4m00s), 12345 samples, 790080 tokens, 500 steps",
        "1m40s since its submission: training 80%, starting 5%, waiting 15%",
        "last pause 0.18 s: vote 0.01, group 0.05, state 0.12; first step after it 0.30 s",
    )
    assert until_end(JobRow(job="a", phase="running", eta_s=60.0)) == "1m00s"


def test_status_shows_gpus_in_the_unit_of_the_batch() -> None:
    gib = 1 << 30
    row = JobRow(job="a", phase="running", workers=2, throughput=64.0, backend="nccl", mfu=0.38, memory_bound=16)
    row = dataclasses.replace(row, gpu_memory_used_bytes=3 * gib, gpu_memory_reserved_bytes=4 * gib)
    assert outlook_lines(row) == (
        "GPUs: 3.0 GiB used, 4.0 reserved; nccl; 32 samples/s each; MFU 38%; 16 samples at once at most",
    )
    (line,) = outlook_lines(dataclasses.replace(row, tokens_per_s=4096.0))
    assert "; 2048 tokens/s each; MFU 38%" in line


def test_a_waiting_job_says_for_what_and_until_when() -> None:
    row = JobRow(job="a", phase="waiting", waits_for="2 slots (GPU 1) on T4", start_s=90.0)
    assert outlook_lines(row) == ("waits for 2 slots (GPU 1) on T4; about 1m30s until they are there",)
    (line,) = [each.text for each in top_lines("", [row], [], size=(120, 24))][2:]
    assert line.endswith("waits for 2 slots (GPU 1) on T4, about 1m30s")


LOOK = """
import os
import sys
import elastic_ray.cli.observe.top as top
from elastic_ray.cli.listings import JobRow
keys = top._Keys(wanted=True)
screen = top._Screen() if top.on_terminal() else top._Scroll()
with keys, screen:
    screen.show("heading", [JobRow(job="evil\\x1b[2J\\x07name", phase="running")], [])
    os.write(2, b"shown\\n")  # a live display takes over sys.stderr
    ended = keys.ended_within(60)
sys.exit(7 if ended else 3)
"""


@pytest.mark.parametrize("plain", [False, True])
def test_q_ends_it_and_the_terminal_is_as_before(plain: bool) -> None:
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    environment: dict[str, Any] = {**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "20"}
    environment.pop("NO_COLOR", None)
    if plain:
        environment["NO_COLOR"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-c", LOOK], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
    )
    assert process.stderr is not None and process.stderr.readline() == b"shown\n"
    os.write(ours, b"q")
    assert process.wait(30) == 7, "q was heard without the return key"
    shown = b""
    while select.select([ours], [], [], 0.2)[0]:
        shown += os.read(ours, 65536)
    assert termios.tcgetattr(theirs) == before
    assert b"evil\\x1b[2J\\x07name" in shown and b"evil\x1b" not in shown and b"\x07name" not in shown
    assert (b"\x1b" in shown) is not plain
    os.close(ours)
    os.close(theirs)
