"""SHELL: trains part of a run again with a different number of workers, and compares the resulting models."""

from __future__ import annotations

import dataclasses
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.train.v2.api.config import RunConfig, ScalingConfig

from elastic_ray.adaptation.policies.stop_at import StopAt
from elastic_ray.adaptation.policy import Policy
from elastic_ray.checkpoints.automatic import StateFile, copy_state, state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.model_loading import differences
from elastic_ray.driver.trainer import ElasticTrainer
from elastic_ray.events import EventKind

TOLERANCE = 1e-3
_POLL_S = 0.5
_END_S = 60.0
_DELETES = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Range of a run's steps between two of its automatic checkpoints, to be trained again."""

    run: RunStorage
    before: StateFile | None  # checkpoint to start from; None for the beginning of training
    after: StateFile  # checkpoint to compare with
    name: str  # of the job that trains them again, whose directory is beside the run's

    @classmethod
    def around(cls, run: str, step: int) -> Window:
        """Return the range of steps between the checkpoints before and after ``step``."""
        storage = RunStorage(run)
        states = state_files(storage)  # newest first
        after = min((each for each in states if each.steps >= step), key=lambda each: each.steps, default=None)
        if after is None:
            there = ", ".join(str(each.steps) for each in reversed(states)) or "none"
            raise ValueError(
                f"a step to replay must have an automatic checkpoint at or after it, but {storage.where} has them at "
                f"steps: {there}. A job that runs keeps CheckpointConfig(num_to_keep), at least two; one that has "
                "finished its last one"
            )
        # Policies are not asked before the first step of a start, so that the stop needs one step more.
        latest = min(step - 1, after.steps - 2)
        before = next((each for each in states if each.steps <= latest), None)
        name = f"{posixpath.basename(storage.path)}-replay-{after.steps}"
        return cls(run=storage, before=before, after=after, name=name)

    @property
    def steps(self) -> str:
        """Description of the range of steps, such as ``steps 100 to 200``."""
        return f"steps {0 if self.before is None else self.before.steps} to {self.after.steps}"

    @property
    def replayed(self) -> RunStorage:
        """Directory of the job that repeats the steps."""
        return RunStorage(posixpath.join(posixpath.dirname(self.run.path), self.name), self.run.filesystem)

    def prepare(self) -> None:
        """Recreate the replay job's directory, containing only the checkpoint to start from, if any."""
        storage = self.replayed
        self.remove()
        storage.create()
        if self.before is not None:
            copy_state(self.run, self.before, storage)

    def remove(self) -> None:
        """Delete the replay job's directory, retrying because the ended job may still be deleting files in it."""
        storage = self.replayed
        for left in reversed(range(_DELETES)):
            if storage.filesystem.get_file_info(storage.path).type.name != "Directory":
                return
            try:
                storage.filesystem.delete_dir(storage.path)
            except FileNotFoundError:
                if not left:
                    raise

    def await_result(self, ended: Callable[[], bool], timeout_s: float) -> ReplayResult:
        """Return :meth:`compare` once the replay job has stored its model.

        Raises ValueError if the job has ``ended`` without a model, and TimeoutError after ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        over = False
        while (found := self.compare()) is None:
            if over:
                raise ValueError(f"the replay has ended before step {self.after.steps}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the replay has not reached step {self.after.steps} within {timeout_s:g} s")
            over = ended()  # it may have stored its model since the comparison
            time.sleep(0.0 if over else _POLL_S)
        return found

    def compare(self) -> ReplayResult | None:
        """Return how the models after the last step differ; None until the replay job has stored its model."""
        stored = next((each for each in state_files(self.replayed) if each.steps == self.after.steps), None)
        if stored is None:
            return None
        found = differences((self.run, self.after), (self.replayed, stored))
        events = (*self.run.read_events(), *self.replayed.read_events())
        return ReplayResult(
            steps=self.steps, differences=found, adapts=any(each.kind is EventKind.BATCH for each in events)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Outcome of a replay: how much its final model differs from the run's."""

    steps: str  # which steps, in words
    differences: Mapping[str, float]  # by tensor, the largest difference over the largest value
    adapts: bool = False  # whether the batch has changed in either: it goes by speeds, which no replay has again

    @property
    def equal(self) -> bool:
        """True if all tensors are equal within rounding."""
        return all(each <= TOLERANCE for each in self.differences.values())

    @property
    def proven(self) -> bool | None:
        """True if the models are equal, False if they differ; None if they differ and either run changed its batch."""
        return True if self.equal else None if self.adapts else False

    def __str__(self) -> str:
        worst = max(self.differences, key=lambda name: self.differences[name])
        said = "gave the same model within rounding" if self.equal else "gave another model"
        if self.proven is None:
            said += ", which proves nothing, for the batch has followed speeds"
        return (
            f"{self.steps}, trained again, {said}: of {len(self.differences)} tensors {worst} differs most, by "
            f"{self.differences[worst]:.1e} of its largest value"
        )


def replay(
    train_loop_per_worker: Callable[..., Any],
    run: str,
    *,
    step: int,
    workers: int,
    adaptation: Policy | Sequence[Policy] = (),
    timeout_s: float = 3600.0,
    **options: Any,
) -> ReplayResult:
    """Train part of a run again with a different number of workers, and compare the resulting models.

    The replay starts at the run's last automatic checkpoint before ``step``, or at the start of training, and ends at
    the next checkpoint. The run's own files are not changed. For example,
    ``replay(train, "/runs/digits", step=120, workers=3).equal`` is True if three workers produce the same model.

    Args:
        train_loop_per_worker: The run's train function.
        run: The run's directory or URI.
        step: Any step in the part to train again.
        workers: Number of workers for the replay.
        adaptation: The run's adaptation policies.
        timeout_s: Maximum time to wait for the replay to end [s].
        **options: Further ``ElasticTrainer`` arguments, as used for the run.

    Raises:
        ValueError: The run has no checkpoint at or after ``step``.
        TimeoutError: The replay takes longer than ``timeout_s``.
        TrainFunctionError: The train function raised; other errors of ``JobHandle.result()`` may also be raised.
    """
    window = Window.around(run, step)
    window.prepare()
    policies = [adaptation] if isinstance(adaptation, Policy) else list(adaptation)
    handle = ElasticTrainer(
        train_loop_per_worker,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=window.name, storage_path=posixpath.dirname(window.run.path), storage_filesystem=window.run.filesystem
        ),
        adaptation=[*policies, StopAt(window.after.steps)],
        **options,
    ).submit()

    def ended() -> bool:
        done = handle.done()
        if done:
            handle.result(timeout=timeout_s)  # raises the job's error
        return done

    try:
        found = window.await_result(ended, timeout_s)
    finally:
        handle.stop(now=True)
        handle.wait(_END_S)
    window.remove()
    return found
