"""What is sent to browsers: plain JSON, and only what has changed."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.observe.page.feed import KEYS, difference, plain, tables, to_json
from elastic_ray.observe.page.model import PageJob, PageSnapshot, PageSource, Strip

JOBS = st.lists(
    st.builds(
        PageJob, job=st.sampled_from("abcdef"), phase=st.sampled_from(["running", "waiting"]), step=st.integers(0, 3)
    ),
    unique_by=lambda job: job.job,
)
BARS = st.lists(
    st.tuples(
        st.integers(1, 9), st.just("n"), st.just("j"), st.just(0.5), st.none() | st.just(2.0), st.just(1), st.just(0)
    ),
    unique_by=lambda bar: bar[0],
)
SNAPSHOTS = st.builds(
    lambda time_s, jobs, bars, running: PageSnapshot(
        time_s=time_s,
        source=PageSource(kind="live", name="x"),
        strip=Strip(running=running),
        jobs=tuple(jobs),
        bars=tuple(bars),
    ),
    st.floats(0, 9),
    JOBS,
    BARS,
    st.integers(0, 2),
)


def applied(before: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """What ``store.js`` does with a change; tables by their keys, since their order does not count."""
    after = dict(before)
    for name, value in change.items():
        if name not in KEYS:
            after[name] = value
            continue
        after[name] = {k: row for k, row in before[name].items() if k not in value["remove"]}
        after[name] |= {row[KEYS[name]]: row for row in value["set"]}
    return after


def keyed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: {row[KEYS[name]]: row for row in value} if name in KEYS else value for name, value in found.items()}


@given(SNAPSHOTS, SNAPSHOTS)
def test_a_change_makes_the_one_snapshot_of_the_other(one: PageSnapshot, other: PageSnapshot) -> None:
    before, after = tables(one), tables(other)
    change = difference(before, after)
    assert applied(keyed(before), {**change, "time_s": after["time_s"]}) == keyed(after)
    assert difference(after, after) == {} and difference(after, {**after, "time_s": 1e9}) == {}
    assert json.loads(to_json(change)) == change


def test_unchanged_rows_are_not_sent_again() -> None:
    def snapshot(step: int) -> dict[str, Any]:
        jobs = tuple(PageJob(job=f"j{n}", phase="running", step=step if n == 7 else 0) for n in range(100))
        return tables(PageSnapshot(time_s=0.0, source=PageSource(kind="live", name="x"), strip=Strip(), jobs=jobs))

    change = difference(snapshot(1), snapshot(2))
    assert list(change) == ["jobs"] and [row["job"] for row in change["jobs"]["set"]] == ["j7"]


def test_numbers_are_short_finite_and_text_cannot_end_line() -> None:
    assert plain([math.nan, math.inf, 1 / 3, 1795404714.58312, np.float32(0.5), np.int64(3), True]) == [
        *(None, None, 0.33333, 1795404714.58, 0.5, 3.0, True),
    ]
    assert plain({"a": object}) == {"a": "<class 'object'>"}
    hostile = "</script><script>alert(1)</script>\n\u2028data: x\n\nevent: snapshot"
    sent = to_json({"job": hostile})
    assert b"\n" not in sent and "\u2028".encode() not in sent and json.loads(sent) == {"job": hostile}
