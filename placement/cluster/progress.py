"""What a job may tell of itself beyond its limits: how far it is, and what only a simulator can know."""

from __future__ import annotations

import dataclasses
import itertools

from placement.checks import check_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is, in scale-invariant iterations: one is the progress of one step at the initial batch M0.

    ``GoodputModel`` speaks of samples per second at M0: divided by M0 it is iterations per second.

    Attributes:
        done: iterations so far, measured.
        epoch_ends: ``done`` at the end of each finished epoch.
        epochs: how many epochs the user declared; None if training has no declared end.
        stride: how many epochs each of ``epoch_ends``, and each of ``epochs``, stands for; 1 before any has ended.
        usual_epoch: iterations that an epoch took other jobs of the same model, until the first one here has ended.
    """

    done: float
    epoch_ends: tuple[float, ...] = ()
    epochs: float | None = None
    stride: int = 1
    usual_epoch: float | None = None

    def __post_init__(self) -> None:
        check_number("done", self.done, least=0, unit="iterations")
        if any(b < a for a, b in itertools.pairwise((0.0, *self.epoch_ends))):
            raise ValueError(f"epoch_ends must never fall, but got {self.epoch_ends}")
        if self.epochs is not None:
            check_number("epochs", self.epochs, above=0)
        check_number("stride", self.stride, least=1, unit="epoch")
        if self.usual_epoch is not None:
            check_number("usual_epoch", self.usual_epoch, above=0, unit="iterations")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Truth that no live job knows, for policies that were published with it.

    Attributes:
        step_s: true seconds of one step at the requested batch on 1, 2, ... workers, each count on as few nodes
            as possible; it ends at the most workers that the batch can be split over.
        remaining_steps: optimizer steps at the requested batch from the end of the present epoch to the end of the
            last one; at least 1.
    """

    step_s: tuple[float, ...]
    remaining_steps: float

    def __post_init__(self) -> None:
        if not self.step_s or any(not step_s > 0 for step_s in self.step_s):
            raise ValueError(f"step_s must hold one time above 0 seconds or more, but got {self.step_s}")
        check_number("remaining_steps", self.remaining_steps, least=0)
