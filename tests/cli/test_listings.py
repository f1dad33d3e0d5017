"""What the listings show of what the cluster answered."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from elastic_ray.cli.listings import (
    DECISION_COLUMNS,
    JOB_COLUMNS,
    NODE_COLUMNS,
    JobAnswers,
    JobRow,
    Submission,
    decision_cells,
    decisions,
    job_cells,
    job_rows,
    metric_cell,
    no_metric,
    node_cells,
    node_rows,
    with_metric,
    with_status,
)
from elastic_ray.cli.output import to_json
from elastic_ray.cli.overview import scaling_lines
from elastic_ray.config import ElasticConfig
from elastic_ray.events import MOST_METRICS, JobPhase, JobStatus, numbers_in
from elastic_ray.job_spec import JobSpec
from placement.allocator.snapshot import CoreSnapshot, DecisionRecord, JobState
from placement.autoscaling.autoscaler import ScalingDecision
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, Cluster, Node
from placement.cluster.jobs import JobView
from placement.reasons import Cause, Reason
from placement.text import ago, plain_table

NODE = Node(
    node_id="abcdef0123456789",
    total={"CPU": 8.0, "GPU": 4.0},
    free={"CPU": 6.0, "GPU": 3.0},
    draining=True,
    labels={GPU_TYPE_LABEL: "T4", MARKET_LABEL: "spot"},
)
RECORD = DecisionRecord(
    time_s=940.0,
    trigger="arrival",
    job="a",
    from_workers=0,
    to_workers=2,
    nodes={NODE.node_id: 2},
    reason=Reason(Cause.PAUSED, ("two\nlines",)),
)


def status(job: str, **fields: Any) -> JobStatus:
    return JobStatus(job=job, phase=JobPhase.RUNNING, workers=2, target_workers=3, step=7, **fields)


def spec(job: str, submission: str = "") -> JobSpec:
    return JobSpec(
        job=job,
        train_loop=b"",
        min_workers=1,
        max_workers=8,
        bundle={"CPU": 1.0},
        use_gpu=False,
        label_selector={},
        storage_path=f"/runs/{job}",
        storage_filesystem=None,
        max_failures=0,
        num_to_keep=None,
        checkpoint_score_attribute=None,
        checkpoint_score_order="max",
        runtime_env={},
        elastic=ElasticConfig(),
        submission=submission,
    )


def snapshot(*views: JobView) -> CoreSnapshot:
    jobs = {
        view.job: JobState(view=view, target={NODE.node_id: 3}, reason=Reason(Cause.PAUSED, ("because",)), heard_s=0.0)
        for view in views
    }
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(CoreSnapshot)}
    told = {
        "policy": "goodput",
        "settled": True,
        "cluster": Cluster(nodes=(NODE,)),
        "jobs": jobs,
        "log": (RECORD,),
        "node_failures": (),
    }
    return CoreSnapshot(**{**fields, **told})


def test_jobs_known_to_controllers_allocator_or_ray_appear_once() -> None:
    view = JobView(job="a", bundle={"CPU": 1}, max_workers=8, submitted_s=100.0, held_at=3, tenant="team")
    silent = JobView(job="b", bundle={"CPU": 1}, max_workers=2, submitted_s=50.0)
    answers = [
        JobAnswers(actor="job:a", status=status("a", metrics={"loss": 0.5}), spec=spec("a", "sub")),
        JobAnswers(actor="job:sweep-1f", status=status("sweep-t3")),  # a trial: its controller has another name
        JobAnswers(actor="job:hangs"),
    ]
    scripts = [
        Submission(submission="sub", status="RUNNING", started_s=90.0),
        Submission(submission="new.2", name="new", status="PENDING"),
    ]
    rows = {row.job: row for row in job_rows(answers, snapshot(view, silent), scripts)}
    assert {job: row.phase for job, row in rows.items()} == {
        "a": "running",
        "b": "silent",
        "sweep-t3": "running",
        "hangs": "silent",
        "new": "submitted",
    }
    assert list(rows).index("b") < list(rows).index("a"), "by arrival"
    assert (rows["a"].held_at, rows["a"].tenant, rows["a"].nodes) == (3, "team", {NODE.node_id: 3})
    cells = dict(zip(JOB_COLUMNS, job_cells(rows["a"], 165.0), strict=True))
    assert (cells["WORKERS"], cells["OF"], cells["AGE"], cells["METRIC"]) == ("2 -> 3", "1:8 held", "1m05s", "loss 0.5")
    assert cells["WHY"] == "because"
    assert all(len(job_cells(row, 0.0)) == len(JOB_COLUMNS) for row in rows.values())


def test_script_that_failed_has_no_numbers_of_a_job() -> None:
    script = Submission(submission="s", status="FAILED", message="pip failed", started_s=90.0, ended_s=95.0)
    (row,) = job_rows([], None, [script])
    cells = {name: cell for name, cell in zip(JOB_COLUMNS, job_cells(row, 100.0), strict=True) if cell}
    assert cells == {"JOB": "s", "PHASE": "failed", "AGE": "5s ago", "WHY": "pip failed"}


def test_name_stands_for_its_submissions_not_for_longer_names() -> None:
    assert JobAnswers(actor="job:x", spec=spec("x", "bert.2")).comes_from("bert")
    assert JobAnswers(actor="job:x", spec=spec("x", "bert")).comes_from("bert")
    assert not JobAnswers(actor="job:x", spec=spec("x", "bert-large")).comes_from("bert")
    assert not JobAnswers(actor="job:x", spec=spec("x")).comes_from("bert")
    assert not JobAnswers(actor="job:x").comes_from("bert")


def test_nodes_show_what_elastic_jobs_may_use_and_hold() -> None:
    resources = {"CPU": 8.0, "GPU": 4.0, "node:10.0.0.1": 1.0, "CPU_group_0_ff": 1.0}
    living = {
        "NodeID": NODE.node_id,
        "Alive": True,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": resources,
        "Labels": NODE.labels,
    }
    dead = {"NodeID": "dead", "Alive": False, "NodeManagerAddress": "10.0.0.2", "Resources": {}}
    (row,) = node_rows([living, dead], snapshot(JobView(job="a", bundle={"CPU": 1})))
    assert row.total == {"CPU": 8.0, "GPU": 4.0}
    assert node_cells(row) == ("abcdef01", "10.0.0.1", "draining", "T4", "spot", "3/4", "6/8", "-", "a:3")
    (alone,) = node_rows([living], None)
    assert alone.free is None and node_cells(alone)[5] == "4" and len(NODE_COLUMNS) == len(node_cells(alone))


def test_decisions_are_the_last_ones_of_one_or_all() -> None:
    seen = dataclasses.replace(snapshot(), log=(RECORD, dataclasses.replace(RECORD, job="b"), RECORD))
    assert [record.job for record in decisions(seen, None, 2)] == ["b", "a"]
    assert len(decisions(seen, "a", 9)) == 2 and decisions(seen, "a", 0) == ()
    assert decision_cells(RECORD, 1000.0) == ("1m00s ago", "arrival", "a", "0 -> 2", "two lines")
    assert len(DECISION_COLUMNS) == 5


def test_plain_tables_are_aligned_and_never_cut() -> None:
    long = "x" * 300
    assert plain_table(("A", "B"), [("1", ""), ("22", long)]) == f"A   B\n1\n22  {long}"


def test_json_takes_whatever_a_train_function_reports() -> None:
    value = {"loss": np.float32(0.5), "bad": float("nan"), "phase": JobPhase.RUNNING, "path": object, "more": (1, None)}
    read = json.loads(to_json([status("a", metrics=value)]))[0]
    assert read["phase"] == "running"
    assert read["metrics"] == {"loss": 0.5, "bad": None, "phase": "running", "path": str(object), "more": [1, None]}


@pytest.mark.parametrize(
    "seconds, text", [(-1, "0s"), (59.9, "59s"), (61, "1m01s"), (7200, "2h00m"), (90_000, "1d01h")]
)
def test_spans_have_two_units(seconds: float, text: str) -> None:
    assert ago(seconds) == text


def test_a_decision_about_nodes_says_changes_and_users_need() -> None:
    decision = ScalingDecision(
        nodes={"firm": 1, "spot": 2, "large": 0},
        add={"spot": 1},
        release=(),
        leaving=(),
        reasons={"spot": Reason(Cause.NEEDED, ("job a", "least cost: 2 workers on spot"), "1 -> 2 nodes")},
        wants={},
        notes={"a": (Reason(Cause.UNMET, ("budget", "at best 1 worker on spot")),)},
        usd_per_h=6.0,
    )
    assert scaling_lines(decision) == [
        "nodes wanted: 1 firm, 2 spot; 6 USD/h",
        "  spot +1: job a: least cost: 2 workers on spot",
        "  job a: its budget cannot be met: at best 1 worker on spot",
    ]


def test_any_metric_by_name_and_what_is_none() -> None:
    reported = {"accuracy": 0.91, "stage": "warm", "eval": {"loss": 0.25}}
    row, other = (with_status(JobRow(job=name, phase=""), status(name, metrics=reported)) for name in "ab")
    own = dataclasses.replace(other, metric="eval/loss")
    assert [metric_cell(each) for each in (row, own)] == ["accuracy 0.91", "eval/loss 0.25"]
    assert [metric_cell(row, name) for name in ("eval/loss", "stage", "none")] == ["0.25", "", ""]
    assert no_metric((row,), "accuracy") == "" == no_metric((), "accuracy")
    assert no_metric((row,), "stage") == "metric 'stage' of job a is 'warm', which is no number"
    assert no_metric((row,), "acuracy") == "no job reports a metric 'acuracy'; did you mean 'accuracy'?"
    cells = dict(zip(with_metric(JOB_COLUMNS, "eval/loss"), job_cells(row, 0.0, "eval/loss"), strict=True))
    assert cells["eval/loss"] == "0.25" and "METRIC" not in cells
    assert list(numbers_in({"b": 1, "loss": 2, "nan": math.nan, "deep": {"x": {"y": {"z": 1}}}})) == ["loss", "b"]
    assert len(numbers_in({str(n): n for n in range(100)})) == MOST_METRICS


def test_status_of_another_version_is_read() -> None:
    made, (kind, values) = JobStatus(job="a", phase=JobPhase.RUNNING, step=3).__reduce__()
    older = {name: value for name, value in values.items() if name != "metric"}
    assert made(kind, {**older, "later": 1}) == JobStatus(job="a", phase=JobPhase.RUNNING, step=3)
    row = JobRow(job="a", phase=JobPhase.RUNNING)
    assert pickle.loads(pickle.dumps(row)) == row
