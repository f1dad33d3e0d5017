"""Workers that train with optimizer state in tiles and save automatic checkpoints, as threads."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastic_ray as er
from elastic_ray.checkpoints.automatic import StateFile, state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.membership.messages import StopJob
from elastic_ray.run.current import WorkerDismissed, session_of_thread
from elastic_ray.run.registry import HookPoint
from elastic_ray.session.session import Session
from elastic_ray.worker.messages import StateSaved
from elastic_ray.worker.state_saver import StateSaver
from tests.loop.changing import Change, Hold, Kill, Outcome, run_job
from tests.sync.tiles.trained import OPTIMIZERS, Net, data


def go_on_from(states: dict[str, Any] | Callable[[str], dict[str, Any] | None] | None) -> Session:
    """This worker's session, which continues from these states, or from what gives each worker its own."""
    session = session_of_thread()
    assert session is not None
    own = states(session.worker) if callable(states) else states
    if own is not None:
        session.states.resume(copy.deepcopy(own), loaded=True)
    return session


def read_checkpoint(storage: RunStorage, state: StateFile) -> dict[str, Any]:
    """All of an automatic checkpoint, as tensors."""
    return open_checkpoint(storage, state, least_bytes=1 << 62)


@dataclasses.dataclass
class Job:
    """A job whose ranks save into a folder, as worker processes do.

    Attributes:
        folder: of the run; ``elsewhere``: of workers whose node has a disk of its own.
        states: that all workers continue from, or what gives each worker its own.
        at: steps in which rank 0 asks for a checkpoint. The first is saved after 4 more, when all have made ready for
            it, others after 2 more.
        settles_to: a rank that writes is waited for in steps up to this.
        between: called in each step.
        ends: called after the last epoch; then what the run ends with is saved, as in worker processes.
        evaluates: each epoch ends with an evaluation, in whose second step rank 0 asks for a checkpoint.
    """

    folder: Path
    strategy: Any = "zero1"
    optimizer: str = "adamw"
    epochs: int = 2
    at: Sequence[int] = ()
    states: dict[str, Any] | Callable[[str], dict[str, Any] | None] | None = None
    elsewhere: dict[str, Path] = dataclasses.field(default_factory=dict)
    storages: Callable[[Path], RunStorage] = lambda folder: RunStorage(str(folder))
    timeout_s: float = 60.0
    settles_to: int = 1000
    records: bool = False
    looks: bool = True  # it is waited for that ranks have looked at storage
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = dataclasses.field(
        default_factory=lambda: OPTIMIZERS
    )
    make: Callable[[], nn.Module] = Net
    data: Callable[[], torch.utils.data.TensorDataset] = data
    between: Callable[[Session, StateSaver, int], None] = lambda session, saver, step: None
    evaluates: bool = False
    ends: Callable[[Session], None] | None = None
    problems: dict[int, str] = dataclasses.field(default_factory=dict)
    saved: list[StateSaved] = dataclasses.field(default_factory=list)

    @property
    def storage(self) -> RunStorage:
        return self.storages(self.folder)

    def run(self, first: tuple[int, ...], script: Sequence[Change | Kill | Hold] = ()) -> Outcome:
        """Train, with these workers at the beginning."""
        self.storage.create()
        return run_job(self.train, script, first=first)

    def files(self) -> tuple[StateFile, ...]:
        """Complete checkpoints, newest first."""
        return state_files(self.storage)

    def read(self, number: int = 0) -> dict[str, Any]:
        """States of one of them."""
        return read_checkpoint(self.storage, self.files()[number])

    def open(self, number: int = 0, *, least_bytes: int = 0) -> dict[str, Any]:
        """The same, with rows of sharded models that are not read; of smaller tensors they are."""
        return open_checkpoint(self.storage, self.files()[number], least_bytes=least_bytes)

    def _told(self, saved: StateSaved) -> float:
        self.saved.append(saved)
        return 1e5

    def train(self) -> Trained:
        model = self.make()
        optimizer = self.optimizers[self.optimizer](model.parameters())
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=self.strategy)
        session = go_on_from(self.states)
        saver = self._saver(session)
        session.registry.add_hook(HookPoint.BETWEEN_STEPS, saver.between_steps)
        steps: dict[int, Any] = {}
        try:
            for _ in er.remaining_epochs_until(self.epochs):
                for x, y in er.AdaptiveDataLoader(self.data(), batch_size=12, seed=3, drop_last=True):
                    step = er.get_context().get_global_step()
                    if self.records:
                        steps[step] = copy.deepcopy((parameters(model), optimizer.state_dict()))
                    if step in self.at and session.rank == 0:
                        saver.ask()
                    self.between(session, saver, step)
                    self._wait_for(saver, step)
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(wrapped(x), y).backward()
                    optimizer.step()
                for number, _ in enumerate(er.AdaptiveDataLoader(self.data(), batch_size=12) if self.evaluates else ()):
                    if number == 1 and session.rank == 0:
                        saver.ask()
                    self._wait_for(saver, 0)
            if self.ends is not None:
                self.ends(session)
                if session.finish(saves=True):
                    saver.save_last(lambda: False)
                vars(session)["finish"] = lambda: False  # it has; who runs the job asks again
            return Trained(parameters(model), optimizer.state_dict(), steps, session.rank, model.state_dict())
        except WorkerDismissed:
            if session.preempted:
                self.problems[session.rank] = saver.save()
            raise
        finally:
            wait_until(lambda: not saver._busy())
            saver.close()

    def preempt_at(self, step: int) -> None:
        """The job is to stop after this step, and to continue another time."""

        def between(session: Session, saver: StateSaver, at: int) -> None:
            if at == step and session.rank == 0:
                session.membership.post(StopJob(save=True))

        self.between = between

    def _wait_for(self, saver: StateSaver, step: int) -> None:
        """Until what it has begun is there."""
        parts = saver._parts
        if self.looks:
            wait_until(lambda: all(call is None or call.answer.done() for call in (parts._looking, parts._making)))
        if step <= self.settles_to:
            wait_until(lambda: not saver._busy())

    def _saver(self, session: Session) -> StateSaver:
        return StateSaver(
            session,
            self.storages(self.elsewhere.get(session.worker, self.folder)),
            self._told,
            keep=2,
            interval_s=1e6,
            timeout_s=self.timeout_s,
            saving=session.registry.saving,
            workers=lambda: tuple(member.worker for member in session.group.members),
        )


@dataclasses.dataclass
class Trained:
    """What a worker ended with; ``steps``: parameters and optimizer state at the beginning of each."""

    parameters: list[torch.Tensor]
    state: dict[str, Any]
    steps: dict[int, Any]
    rank: int
    model_state: dict[str, Any]


def parameters(model: nn.Module) -> list[torch.Tensor]:
    """Copies of them."""
    return [p.detach().clone() for p in model.parameters()]


def wait_until(there: Callable[[], bool]) -> None:
    """For as long as a crowded machine may take."""
    deadline_s = time.monotonic() + 60.0
    while not there():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
