"""How a job ended, as the cluster remembers it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from elastic_ray.cli.listings import JOB_COLUMNS, ended_row, job_cells, job_rows
from elastic_ray.events import JobPhase, JobStatus, TrialFacts
from elastic_ray.record.ended import EndedJobNote
from elastic_ray.sealed import Raised
from tests.job.specs import spec

ERROR = Raised(traceback_text="Traceback (most recent call last):\n  ...\nKeyError: 'x'\n", rank=1, node="n")
STATUS = JobStatus(job="j", phase=JobPhase.FAILED, step=7, message="the train function raised", training_s=60.0)


def test_it_survives_being_noted() -> None:
    ended = EndedJobNote.of(spec(user="ann"), STATUS, 1000.0, ERROR, {"loss": math.inf, "epoch": 3})
    assert EndedJobNote.from_json(ended.to_json()) == ended
    assert (ended.cause, ended.duration_s, ended.user) == ("KeyError: 'x'", 60.0, "ann")
    trial = TrialFacts(sweep="s", parameters={"lr": 0.1}, metric="loss", rungs=(1, 3))
    noted = dataclasses.replace(ended, status=dataclasses.replace(ended.status, trial=trial))
    assert EndedJobNote.from_json(noted.to_json()) == noted
    odd = EndedJobNote.of(spec(), STATUS, 1000.0, None, {"what": {1: object()}})
    assert "object" in str(EndedJobNote.from_json(odd.to_json()).status.metrics["what"]) and odd.cause == STATUS.message


@pytest.mark.parametrize("text", ["[]", "{}", '{"status": {"phase": "gone"}}', '{"status": {"phase": "failed"}}', "{"])
def test_what_is_no_such_note_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        EndedJobNote.from_json(text)


def test_it_is_listed_until_its_name_is_taken_again() -> None:
    ended = EndedJobNote.of(spec(), STATUS, 1000.0, ERROR, {"loss": 0.5})
    (row,) = job_rows((), None, (), [ended])
    assert row == ended_row(ended) and row.failed and row.submitted_s == 940.0
    cells = dict(zip(JOB_COLUMNS, job_cells(row, 1065.0), strict=True))
    assert (cells["AGE"], cells["WHY"], cells["METRIC"]) == ("1m05s ago", "KeyError: 'x'", "loss 0.5")
