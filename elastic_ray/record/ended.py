"""Record of a job that has ended, which the cluster keeps for an hour (pure)."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic_ray.events import JobPhase, JobStatus, TrialFacts, named_parts
from elastic_ray.job_spec import JobSpec
from elastic_ray.json_numbers import build, dump, dumpable, load
from elastic_ray.sealed import Raised
from placement.versions import check_format

FORMAT = 1
_LEFT_OUT = ("last_pause", "metrics", "trial")  # of a status: read apart


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedJobNote:
    """Record of a job that has ended: its last status, outcome and error."""

    status: JobStatus
    ended_s: float  # when [s since the epoch]
    cause: str  # last line of the traceback that ended it, or else the status' message
    user: str
    tenant: str
    storage_path: str  # where its results are
    submission: str  # Ray's submission that it came from; empty if it was started otherwise

    @classmethod
    def of(
        cls, spec: JobSpec, status: JobStatus, ended_s: float, error: BaseException | Raised | None, metrics: Any
    ) -> EndedJobNote:
        """Return the record of a job that ended at ``ended_s``, with its last status, error and metrics."""
        lines = str(getattr(error, "traceback_text", "")).strip().splitlines()
        return cls(
            status=dataclasses.replace(status, metrics=dict(metrics)),
            ended_s=ended_s,
            cause=lines[-1].strip() if lines else status.message,
            user=spec.user,
            tenant=spec.scheduling.tenant,
            storage_path=spec.storage_path,
            submission=spec.submission,
        )

    @property
    def duration_s(self) -> float:
        """Time from submission until the job ended [s]."""
        return sum(named_parts(self.status).values())

    def to_json(self) -> str:
        """Return the record as JSON, with the ``repr`` of each metric if JSON cannot represent the metrics."""
        names = [field.name for field in dataclasses.fields(JobStatus) if field.name not in _LEFT_OUT]
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "status"}
        status = {name: getattr(self.status, name) for name in names} | {"phase": self.status.phase.value}
        if self.status.trial is not None:
            status["trial"] = dataclasses.asdict(self.status.trial)
        metrics = {str(name): value for name, value in self.status.metrics.items()}
        return dump({"format": FORMAT, **said, "status": {**status, "metrics": dumpable(metrics)}})

    @classmethod
    def from_json(cls, text: str | bytes) -> EndedJobNote:
        """Parse the output of :meth:`to_json`. Raises ValueError if the text is invalid or from a newer release."""
        told = load(text)
        if not isinstance(told, dict) or not isinstance(told.get("status"), dict):
            raise ValueError("a note of an ended job must be an object with an object 'status'")
        check_format(told, FORMAT)
        said, what = told["status"], "a note of an ended job"
        read = {"phase": JobPhase(said.get("phase")), "trial": TrialFacts.read(said.get("trial"))}
        return build(cls, told, what, status=build(JobStatus, said, what, **read))
