"""State of a job that a restarted controller needs beyond what workers tell it: small and plain (pure)."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping

from elastic_ray.job_spec import JobSpec
from elastic_ray.sealed import Sealed
from placement.versions import check_format

FORMAT = 1
_MOST_VALUE = 1 << 16  # bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """A job as its controller knew it.

    Attributes:
        job: its name.
        run: its run (:func:`run_of`); a trial that is paused and continues has another one.
        phase: value of its ``JobPhase``.
        message: of its status.
        submitted_s: when it was submitted [s since the epoch].
        issued: number of its latest generation.
        announced: members of the latest generation that was announced since its last start.
        trained: whether one has taken effect since then.
        world_size: workers of the generation in effect.
        named: number of its latest worker.
        earlier: number of the last worker of the trial that the controller ran before.
        nodes: workers on each node that it is heading for.
        reason: why.
        held_at: number of workers that its driver holds it at.
        weight: what its speed counts.
        failures: restarts from a checkpoint.
        raised: workers that were lost to an exception of their own.
        lost: losses so far, in whole jobs.
        fruitless: restarts since it had a new checkpoint.
        saved_steps: steps of its newest checkpoint at its last restart.
        most_workers: largest group that it has had.
        resizes: how often it has changed size.
        resize_cost_s: pause of a change [s].
        start_s: time from a start of processes to the group that they form [s].
        launched_at_s: when the processes began that start now [s since the epoch]; None where none start.
        saved: whether it has saved itself.
        stopping: whether it was told to stop.
        paused: why it is paused; empty where it is not.
        preempted: why it is being preempted; None where it is not.
        processes: name of each worker's process, by worker.
        homes: node of each worker's process.
        pids: number of each worker's process on its node.
        revivals: when controllers were restarted [s since the epoch].
        claimed: scripted faults that were carried out.
        first_report: number of its first report; 0 before it.
        return_value: what rank 0's train function returned, of a job that has ended, if it is small (:func:`as_text`).
        trackers: what its trackers have to know to continue with their runs.
        format: of the note.
    """

    job: str
    run: str
    phase: str
    message: str
    submitted_s: float
    issued: int
    announced: tuple[str, ...]
    trained: bool
    world_size: int
    named: int
    earlier: int
    nodes: Mapping[str, int]
    reason: str
    held_at: int | None
    weight: float
    failures: int
    lost: float
    fruitless: int
    saved_steps: int
    most_workers: int
    resizes: int
    resize_cost_s: float
    start_s: float
    saved: bool
    stopping: bool
    preempted: str | None
    processes: Mapping[str, str]
    homes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    revivals: tuple[float, ...] = ()
    claimed: tuple[int, ...] = ()
    first_report: int = 0
    return_value: str | None = None
    trackers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    launched_at_s: float | None = None
    raised: int = 0
    paused: str = ""
    format: int = FORMAT

    @classmethod
    def from_json(cls, text: str) -> ControllerState:
        """The inverse of ``json.dumps(dataclasses.asdict(state))``. Raises ValueError: it is something else."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a note must be a JSON object, but got {text[:100]!r}")
        check_format(values, FORMAT)
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"a note lacks fields: {error}") from None


def run_of(spec: JobSpec) -> str:
    """Return a digest that tells a run of a job, or of a trial, from others of the same controller."""
    return hashlib.sha256(f"{spec.job} {spec.storage_path} {spec.secret}".encode()).hexdigest()


def as_text(value: Sealed | None) -> str | None:
    """For a note, what a train function returned, if it is small; else None."""
    return base64.b64encode(value.pickled).decode() if value is not None and len(value.pickled) <= _MOST_VALUE else None


def from_text(text: str | None) -> Sealed | None:
    """The inverse of :func:`as_text`."""
    return Sealed(pickled=base64.b64decode(text)) if text is not None else None
