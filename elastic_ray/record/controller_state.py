"""Job state that a restarted controller needs in addition to the workers' reports, as plain values (pure)."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping

from elastic_ray.job_spec import JobSpec
from elastic_ray.json_numbers import build
from elastic_ray.sealed import Sealed
from placement.versions import check_format

FORMAT = 1
_MOST_VALUE = 1 << 16  # bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """State of a job that its controller saves for a replacement controller."""

    job: str
    run: str  # its run (:func:`run_of`); a trial that is paused and continues has another one
    phase: str  # value of its ``JobPhase``
    message: str
    submitted_s: float  # when it was submitted [s since the epoch]
    issued: int  # number of its latest generation
    announced: tuple[str, ...]  # members of the latest generation that was announced since its last start
    trained: bool  # whether one has taken effect since then
    world_size: int  # workers of the generation in effect
    named: int  # number of its latest worker
    nodes: Mapping[str, int]  # workers on each node that it is heading for
    reason: str  # why
    held_at: int | None  # number of workers that its driver holds it at
    weight: float  # what its speed counts
    failures: int  # restarts from a checkpoint
    lost: float  # losses so far, in whole jobs
    fruitless: int  # restarts since it had a new checkpoint
    saved_steps: int  # steps of its newest checkpoint at its last restart
    most_workers: int  # largest group that it has had
    resizes: int  # how often it has changed size
    resize_cost_s: float  # pause of a change [s]
    start_s: float  # time from a start of processes to the group that they form [s]
    saved: bool  # whether it has saved itself
    stopping: bool  # whether it was told to stop
    preempted: str | None  # why it is being preempted; None where it is not
    processes: Mapping[str, str]  # name of each worker's process, by worker
    homes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # node of each worker's process
    pids: Mapping[str, int] = dataclasses.field(default_factory=dict)  # number of each worker's process on its node
    revivals: tuple[float, ...] = ()  # when controllers were restarted [s since the epoch]
    claimed: tuple[int, ...] = ()  # scripted faults that were carried out
    first_report: int = 0  # number of its first report; 0 before it
    # what rank 0's train function returned, of a job that has ended, if it is small (:func:`as_text`)
    return_value: str | None = None
    # what its trackers have to know to continue with their runs
    trackers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # when the processes began that start now [s since the epoch]; None where none start
    launched_at_s: float | None = None
    raised: int = 0  # workers that were lost to an exception of their own
    paused: str = ""  # why it is paused; empty where it is not
    critical_batch: int | None = None  # what its branches have measured [samples]; None where none have
    format: int = FORMAT

    @classmethod
    def from_json(cls, text: str) -> ControllerState:
        """Parse ``json.dumps(dataclasses.asdict(state))``. Raises ValueError if the text is invalid."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a note must be a JSON object, but got {text[:100]!r}")
        check_format(values, FORMAT)
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return build(cls, values | lists, "a note")


def run_of(spec: JobSpec) -> str:
    """Return a digest that distinguishes this run of a job or trial from the same controller's other runs."""
    return hashlib.sha256(f"{spec.job} {spec.storage_path} {spec.secret}".encode()).hexdigest()


def as_text(value: Sealed | None) -> str | None:
    """Return a train function's return value as text, to be stored; None if it is missing or too large."""
    return base64.b64encode(value.pickled).decode() if value is not None and len(value.pickled) <= _MOST_VALUE else None


def from_text(text: str | None) -> Sealed | None:
    """Return the value that :func:`as_text` converted to ``text``; None for None."""
    return Sealed(pickled=base64.b64decode(text)) if text is not None else None
