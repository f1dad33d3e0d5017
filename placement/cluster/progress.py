"""Progress of a job, as reported by the job."""

from __future__ import annotations

import dataclasses
import itertools

from placement.checks import check_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a job in scale-invariant iterations, each the progress of one step at the initial batch M0.

    ``GoodputModel`` counts samples per second at M0; divided by M0, this gives iterations per second.
    """

    done: float  # iterations so far, measured
    epoch_ends: tuple[float, ...] = ()  # ``done`` at the end of each finished epoch
    epochs: float | None = None  # how many epochs the user declared; None if training has no declared end
    first_epochs: float | None = None  # how many it declared first, in the unit of ``epochs``, as far as that is known
    # how many epochs each of ``epoch_ends``, and each of ``epochs``, stands for; 1 before any has ended
    stride: int = 1
    # iterations that an epoch took other jobs of the same model, until the first one here has ended
    usual_epoch: float | None = None
    usual_ends: tuple[float, ...] = ()  # iterations after which earlier jobs of the same model ended
    # parts of the length first declared after which those ended that have the same declarer, above 1 where they went on
    # beyond it
    usual_parts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_number("done", self.done, least=0, unit="iterations")
        if any(b < a for a, b in itertools.pairwise((0.0, *self.epoch_ends))):
            raise ValueError(f"epoch_ends must never fall, but got {self.epoch_ends}")
        if self.epochs is not None:
            check_number("epochs", self.epochs, above=0)
        if self.first_epochs is not None:
            check_number("first_epochs", self.first_epochs, above=0)
        check_number("stride", self.stride, least=1, unit="epoch")
        if self.usual_epoch is not None:
            check_number("usual_epoch", self.usual_epoch, above=0, unit="iterations")
        for field in ("usual_ends", "usual_parts"):
            for each in getattr(self, field):
                check_number(field, each, above=0, finite=True)
