"""Submission of a job, stored in the run's directory so that another cluster can submit the job again (pure)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ray.events import EventKind, JobEvent
from elastic_ray.json_numbers import build, known_fields, load
from placement.versions import check_format

_FORMAT = 1
_RESUMED = ".resumed-"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """Submission of a job, as its driver made it."""

    job: str
    storage: str  # directory of the run
    session: str  # Ray's name of the session of the cluster's head, which each head has of its own
    address: str  # HOST:PORT of that cluster's control store
    submitted_s: float  # [s since the epoch], on the driver's clock
    submission: str = ""  # id of Ray's submission that the script was; empty of a script that was run by hand
    # arguments of ``elastic-ray submit`` that submit the script again, paths absolute; empty as above
    command: tuple[str, ...] = ()
    user: str = ""  # owner of the job
    named: bool = True  # whether the script, submitted again, gives the job the same name
    script: str = ""  # the script, for messages
    host: str = ""  # the driver's machine, until its reboot
    events_before: int | None = None  # number of events in the run's directory by then; None from earlier releases
    format: int = _FORMAT

    def to_json(self) -> str:
        """Return the submission as JSON for :meth:`from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> SubmittedJob:
        """Parse the output of :meth:`to_json`. Raises ValueError if the text is invalid."""
        values = load(text)
        if not isinstance(values, dict):
            raise ValueError(f"a submission must be a JSON object, but got {values!r:.80}")
        check_format(values, _FORMAT)
        known = known_fields(cls, values)
        if not isinstance(words := known.get("command", []), list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"a submission's command must be a list of texts, but got {words!r:.80}")
        for name, value in known.items():
            kind = _KINDS.get(name, str)
            if not isinstance(value, kind):
                raise ValueError(f"a submission's {name} cannot be {value!r:.80}")
        return build(cls, known, "a submission", command=tuple(words))

    @property
    def next_submission(self) -> str:
        """Id of the Ray job submission that continues the script; always the same, so that Ray rejects duplicates."""
        token = hashlib.sha256(f"{self.session} {self.submission}".encode()).hexdigest()[:8]
        return f"{self.submission.partition(_RESUMED)[0]}{_RESUMED}{token}"

    def why_not(self, events: Iterable[JobEvent]) -> str | None:
        """Return why the job cannot be resubmitted, based on its events; "" if it can, None if the job has ended."""
        last, before = None, self.events_before
        for number, event in enumerate(events):
            # Events have the time of the controller's machine, whose clock may differ from the driver's.
            since = event.time_s >= self.submitted_s if before is None else number >= before
            if since and event.kind in _ENDS:
                last = event.kind
        if last is EventKind.FINISHED:
            return None
        if last is EventKind.PAUSED:
            return f"it was paused; submit its script again to let it continue: {self.by_hand}"
        if not self.command:
            return f"its code is not known, as `elastic-ray submit` did not start it; continue it: {self.by_hand}"
        if not self.named:
            return (
                "its script gave it a fresh name, as it would again; name it with RunConfig(name), and continue it: "
                f"{self.by_hand}"
            )
        return ""

    @property
    def by_hand(self) -> str:
        """Instructions for the user on how to continue the job manually."""
        script = self.script or "its script"
        return f"run {script} with RunConfig(name={self.job!r}) and the same storage_path"


_KINDS: Mapping[str, Any] = {
    "command": list,
    "submitted_s": float | int,
    "named": bool,
    "format": int,
    "events_before": int | None,
}
_ENDS = (EventKind.PAUSED, EventKind.RESUMED, EventKind.STARTED, EventKind.FINISHED)
