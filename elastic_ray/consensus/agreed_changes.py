"""Joint decisions of all ranks: numbers that travel with collectives, from which each rank concludes the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.announcer import PAYLOAD_SIZE
from elastic_ray.consensus.intents import agreed_generations_ahead, names_agree, names_ballot

if TYPE_CHECKING:
    from elastic_ray.consensus.unit_wishes import UnitWishes
    from elastic_ray.membership.worker_side import WorkerMembership


# What rides on every gradient reduction and vote: generations ahead, their square, stop, rank 0's wish for m and s,
# preemption, how often rank 0 has reported, its wishes that all ranks hold the same model (1) and compare it (2),
# whether a rank ran out of memory, and the critical batch that rank 0 knows.
CONTROL_SIZE = 10
# A vote continues with a digest of the names of sums, and how many they are. The sums themselves follow there as far as
# there is room, and in a reduction of their own from there on: of a length that is known to be the same by then.
_NAMES_END = CONTROL_SIZE + 4
_SUMS_ROOM = PAYLOAD_SIZE - _NAMES_END

_UNRECORDED = 3  # reports of another rank without one of rank 0
UNRECORDED = (
    f"a rank other than 0 has called report() {_UNRECORDED} times and rank 0 never: metrics are recorded from rank 0 "
    "alone. Call report() on every rank, or on rank 0; numbers of all ranks add up in an elastic_ray.Accumulator"
)

Sums: TypeAlias = Mapping[tuple[int, int], Mapping[str, float]]


class AgreedChanges:
    """Decisions that the ranks of the present group have agreed on and not yet carried out.

    Attributes:
        generation: generation to go to after this step, 0 for none.
        stop: the job stops after this step, for good.
        preempted: it stops there to continue another time.
        batch: batch shape to change to, None to continue as it is.
        comparison: all ranks are to compare their models with the next announcement that they make.
        ran_out: a rank ran out of memory in the step in progress: this one, or, once the sums are known, any.
        saves: checkpoints are reported in the present group.
        reports: rank 0's calls of ``report``; another rank may take its place, and need not have called it as often.
        critical_batch: what the job's branches have measured; None where none have, and in a group's first step.

    Args:
        wishes: what the controller wants of this rank.
    """

    def __init__(self, wishes: WorkerMembership | UnitWishes) -> None:
        self._wishes = wishes
        self.generation = 0
        self.stop = False
        self.preempted = False
        self.ran_out = False
        self.reports = 0
        self.batch: BatchChoice | None = None
        self.critical_batch: int | None = None
        self._wants_consensus = self._consensus = False
        self._wants_comparison = self.comparison = self.saves = False
        self._heard = self._others = 0

    def begin(self) -> None:
        """Enter a group, in which agreements of another one do not count."""
        self.generation, self.batch, self.ran_out, self.critical_batch = 0, None, False, None
        self._wants_consensus = self._consensus = False
        self._wants_comparison = self.comparison = self.saves = False

    def ask_for_comparison(self, wanted: bool) -> None:
        """Rank 0 has reported, and a checkpoint with it if ``wanted``: are all ranks the same?"""
        self._wants_comparison = self._wants_comparison or wanted

    def compared(self) -> None:
        """Mark the comparison as done."""
        self.comparison = False

    def ask_for_consensus(self) -> None:
        """Rank 0 wants all ranks to hold the same model after the next step, to save it."""
        self._wants_consensus = True

    def take_consensus(self) -> bool:
        """Return True once if all ranks must make their models identical now."""
        asked, self._consensus = self._consensus, False
        return asked

    def take_generation(self) -> int:
        """Return the agreed generation, which has to be agreed on again if it is not entered now."""
        generation, self.generation = self.generation, 0
        return generation

    def take_batch(self) -> BatchChoice | None:
        """Return the agreed batch shape, once."""
        batch, self.batch = self.batch, None
        return batch

    def run_out(self) -> None:
        """Record that this rank has run out of memory."""
        self.ran_out = True

    def forget_ran_out(self) -> None:
        """Clear that ranks ran out of memory, because the step is undone."""
        self.ran_out = False

    def count_reports(self, reports: int) -> None:
        """Set the number of reports that the run has made on this rank."""
        self.reports = reports

    def is_unrecorded(self) -> bool:
        """True on the third report of another rank, if rank 0 has never reported."""
        self._others += 1
        return self._others == _UNRECORDED and not self._heard

    def values(self, rank: int) -> list[float]:
        """Return this rank's contribution to the control sums (``CONTROL_SIZE`` values, exact in float32)."""
        wishes = self._wishes
        ahead = float(wishes.prepared_ahead)
        wish = wishes.wanted_batch if rank == 0 else None
        return [
            ahead,
            ahead * ahead,
            float(wishes.stop_requested),
            float(wish.atomic_bsz) if wish else 0.0,
            float(wish.accum_steps) if wish else 0.0,
            float(wishes.preempting),
            float(self.reports) if rank == 0 else 0.0,
            float(self._wants_consensus + 2 * self._wants_comparison) if rank == 0 else 0.0,
            float(self.ran_out),
            float(wishes.critical_batch) if rank == 0 else 0.0,
        ]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Receive the sums over all ranks, from which every rank draws the same conclusions."""
        if sums[0] > 0 and (ahead := agreed_generations_ahead(sums[0], sums[1], world_size)):
            self.generation = self._wishes.generation + ahead
        self.stop = self.stop or sums[2] > 0
        self.preempted = self.preempted or sums[5] > 0
        self._heard = max(self._heard, round(sums[6]))
        self.reports = max(self.reports, self._heard)
        wishes = round(sums[7])
        if wishes & 1:
            self._wants_consensus, self._consensus = False, True
        if wishes & 2:
            self._wants_comparison, self.comparison, self.saves = False, True, True
        self.ran_out = self.ran_out or sums[8] > 0
        if sums[3] > 0:
            self.batch = BatchChoice(atomic_bsz=round(sums[3]), accum_steps=round(sums[4]))
        if sums[9] > 0:
            self.critical_batch = round(sums[9])

    def vote(
        self, communicator: Communicator, added: Sums, agree: Callable[[Sequence[float]], Sequence[float]]
    ) -> list[tuple[tuple[int, int], str, float]]:
        """Agree in a collective of its own, and add up what the ranks' accumulators were given.

        Args:
            communicator: of the present group.
            added: what this rank has added, by accumulator and name.
            agree: announces the vote; adds up numbers that ride along.

        Returns accumulator, name and sum over the ranks, in the same order everywhere.

        Raises:
            CommunicationFailedError: the collective failed.
            RanksDisagreeError: the ranks are not at the same place.
            RuntimeError: the ranks have added to different names.
        """
        names = [(key, name) for key in sorted(added) for name in sorted(added[key])]
        world_size = communicator.world_size
        if world_size == 1:
            self.conclude(self.values(communicator.rank), 1)
            return [(key, name, added[key][name]) for key, name in names]
        sums = [added[key][name] for key, name in names]
        ballot = list(agree([*self.values(communicator.rank), *names_ballot(names), *sums[:_SUMS_ROOM]]))
        self.conclude(ballot[:CONTROL_SIZE], world_size)
        if not names_agree(ballot[CONTROL_SIZE:_NAMES_END], world_size):
            raise RuntimeError(
                "every rank must add to the same names of the same Accumulators in a step, at least 0.0, but they "
                f"differ; this rank has added to {sorted({name for _, name in names}) or 'none'}"
            )
        if len(sums) > _SUMS_ROOM:
            rest = torch.tensor(sums[_SUMS_ROOM:], dtype=torch.float64)
            communicator.wait(communicator.all_reduce(rest))
            sums[_SUMS_ROOM:] = rest.tolist()
        sums[:_SUMS_ROOM] = ballot[_NAMES_END : _NAMES_END + min(len(sums), _SUMS_ROOM)]
        return [(key, name, value) for (key, name), value in zip(names, sums, strict=True)]


def with_names_of_first_rank(communicator: Communicator, added: Sums) -> Sums:
    """Return this rank's sums, with 0 for names that only rank 0 has: a rank without a batch cannot know them.

    Raises CommunicationFailedError: the collective failed.
    """
    if communicator.world_size == 1:
        return added
    names = [[*key, name] for key in sorted(added) for name in sorted(added[key])]
    told = communicator.broadcast_bytes(json.dumps(names).encode(), 0)
    known = {key: dict(sums) for key, sums in added.items()}
    for scope, number, name in json.loads(told):
        known.setdefault((scope, number), {}).setdefault(name, 0.0)
    return known
