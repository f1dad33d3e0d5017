"""A worker with a real session and real groups, whose controller is the test: it records and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import Communicator
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import set_session
from elastic_ray.run.registry import HookPoint
from elastic_ray.session.session import Session
from elastic_ray.standalone.session import StandaloneController
from elastic_ray.state.progress import Link

WAIT_S = 20.0


def group(number: int, *workers: str, **fields: Any) -> GenerationSpec:
    """Generation of these workers, of the one under test by default."""
    members = tuple(Member(worker=each, node="here") for each in workers or ("0",))
    return GenerationSpec(generation=number, members=members, **fields)


class Controller(StandaloneController):
    """Records what its worker reports, and answers a failure with the messages that the test has prepared."""

    def __init__(self, post: Callable[[Any], None], first: GenerationSpec) -> None:
        super().__init__(1, post)
        self.answer, self.first = post, first
        self.answers: list[Any] = []
        self.failures, self.entered = list[tuple[int, str]](), list[int]()

    def ready(self, loader: Any, *, has_state: bool, loaded: int = 0) -> None:
        self.answer(self.first)

    def failed(self, generation: int, cause: str) -> None:
        self.failures.append((generation, cause))
        for message in self.answers:
            self.answer(message)

    def switched(self, generation: int, pause: Pause, proof: Link) -> None:
        self.entered.append(generation)


class Worker:
    """A session whose groups consist of it alone, unless ``form`` makes others."""

    def __init__(self, first: GenerationSpec | None = None, form: Any = None, **options: Any) -> None:
        self.membership = WorkerMembership("0", form or self._form, lambda generation, cause: None)
        self.controller = Controller(self.membership.post, first or group(1))
        self.session = Session("0", self.membership, self.controller, **{"regroup_timeout_s": WAIT_S, **options})
        set_session(self.session)
        self.shapes: list[BatchChoice | None] = []
        self.session.registry.add_hook(HookPoint.SHAPE_CHANGED, lambda: self.shapes.append(self.session.states.shape))

    def _form(self, spec: GenerationSpec, rank: int) -> Communicator:
        times = {"timeout_s": WAIT_S, "form_timeout_s": WAIT_S}
        return Communicator(None, "alone", rank=0, world_size=1, host="127.0.0.1", **times)

    def post(self, *messages: Any) -> Callable[[], None]:
        """Deliver messages when called, and return once a group that they announce is formed."""

        def deliver() -> None:
            for message in messages:
                self.membership.post(message)
                number = message.generation if isinstance(message, GenerationSpec) else 0
                while number and self.membership.prepared_spec(number) is None:
                    time.sleep(0.001)

        return deliver

    def train(self, at: Mapping[int, Callable[[], None]] | None = None) -> int:
        """Draw the four steps of an epoch; ``at`` has what happens in which."""
        loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(12)), batch_size=3)
        for _ in er.remaining_epochs_until(1):
            for _ in loader:
                (at or {}).get(self.session.progress.loader_steps, lambda: None)()
        return self.session.progress.loader_steps
