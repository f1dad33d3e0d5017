"""Units whose workers are threads, over real gloo groups. No Ray, and no default group, which is a process's."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.communication.communicator import Communicator
from elastic_ray.communication.unit_group import UnitCommunicator, UnitGroup
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import set_session
from elastic_ray.session.session import Session
from elastic_ray.state.progress import Link
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.unit import Unit, place_in
from tests.membership.groups import LocalController, local_controller, member

_WAIT_S = 30.0

FEATURES = 6


class _Job:
    """Controller that hears everything and does nothing."""

    paced = False

    def ready(self, loader: LoaderInfo | None, *, has_state: bool, loaded: int = 0) -> None: ...

    def failed(self, generation: int, cause: str) -> None: ...

    def switched(self, generation: int, pause: Pause, proof: Link) -> None: ...

    def report_soon(self) -> None: ...

    def report_missed(self, metrics: Mapping[str, Any], resume_point: ResumePoint, index: int) -> None: ...

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: ResumePoint, index: int) -> None: ...

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None: ...

    def tracker_dir(self) -> str:
        raise NotImplementedError

    def claim_fault(self, index: int) -> bool:
        return False


def run_units(
    train: Callable[[UnitGroup], Any], folder: Path, *, units: int = 2, unit: Unit | int = 2, **options: Any
) -> list[list[Any]]:
    """What ``train`` returns on each worker, by unit and position; ``options`` are the sessions'."""
    size = unit if isinstance(unit, int) else unit.size
    members = tuple(Member(worker=f"w{number + 1}", node="here") for number in range(units))

    def work(controller: LocalController, number: int, position: int) -> Any:
        group = UnitGroup(place_in(unit, position, str(folder / str(number) / "store")), cuda=False, timeout_s=_WAIT_S)
        make = functools.partial(UnitCommunicator, group)

        def form(spec: GenerationSpec, rank: int) -> Communicator:
            return member(controller, rank, units, make=make, form_s=_WAIT_S, timeout_s=_WAIT_S)

        membership = WorkerMembership(f"w{number + 1}", form, lambda generation, cause: None)
        session = Session(f"w{number + 1}", membership, _Job(), unit=group, **options)
        membership.post(GenerationSpec(generation=1, members=members))
        set_session(session)
        try:
            found = train(group)
            session.finish()
            return found
        finally:
            membership.close(broken=False)

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(units * size) as pool:
        controllers = [stack.enter_context(local_controller()) for _ in range(size)]
        workers = [(controllers[position], number, position) for number in range(units) for position in range(size)]
        found = list(pool.map(lambda each: work(*each), workers))
    return [found[first : first + size] for first in range(0, len(found), size)]


def added_in(unit: UnitGroup, tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the workers of a unit."""
    rows = unit.gather(tensor.flatten().tolist())
    return torch.tensor(rows, dtype=torch.float64).sum(0).reshape(tensor.shape).to(tensor.dtype)


class Rows(nn.Module):
    """Rows of a linear layer behind a scale and a shift that all workers hold, the shift without gradients at first."""

    begins = 0

    def __init__(self, part: slice, unit: UnitGroup | None) -> None:
        super().__init__()
        self.steps = 0
        self.late = nn.Parameter(torch.linspace(0.2, 0.5, FEATURES, dtype=torch.float64))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES, dtype=torch.float64))
        weight = torch.linspace(-0.9, 0.8, 8 * FEATURES, dtype=torch.float64).sin().reshape(8, FEATURES)
        self.weight = nn.Parameter(weight[part].clone())
        if unit is not None:
            for param in (self.scale, self.late):
                param.register_hook(lambda grad: added_in(unit, grad))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return (x * self.scale + self.late * (self.steps > self.begins)) @ self.weight.T
