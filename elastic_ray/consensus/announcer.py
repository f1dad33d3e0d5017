"""Announcements that ranks exchange before collectives, each a small all-reduce of fixed size.

Gradient reductions are announced the first time. After that, a rank announces one only if it has waited for a long
time. They use the gradient group, where a rank that is doing anything else can only delay them, not corrupt them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.intents import (
    Announced,
    Intent,
    RanksDisagreeError,
    disagreement,
    joined_by_idle,
    layouts_differ,
    notes_differ,
    transfer,
)

# Values that ride along, added up over the ranks; parts of the control sums have room of their own after them.
PAYLOAD_SIZE = 32
# Ranks that have returned wait for those that have not, which may be busy for hours: exporting a model, for instance.
# So do announcements of those that have waited for a slow one: it takes part when it next announces something itself.
_FINISHED_S = 7 * 24 * 3600.0
# A rank that waits for longer than this says what for; half of what a disagreement takes to be found out.
_PATIENCE_S = 2.0
_HEARING_S = 0.2
_TAGS = 64
# Bytes of a strategy's name, and how long a rank that cannot continue waits for those of the others.
_NAME_BYTES, _NAMES_S = 64, 5.0


class Announcer:
    """Announcements of one rank in one group, which let ranks check that their next collectives match.

    Each rank contributes four numbers at its own position: its intent, the number of loader steps it has committed, a
    fingerprint of its parameters (0 if not requested; the message number if it is waiting for a message), and the
    number of its phase. A phase consists of an announcement (sent or only recorded) and the collectives that it
    announces; it must end before the next one starts. An announcement that a rank makes while waiting may be outdated
    when the other ranks make theirs. In that case the phase numbers differ, and all ranks announce again. Methods that
    wait for other ranks raise CommunicationFailedError if the group breaks.

    Args:
        communicator: Communicator of a group with at least two ranks.
        room: Largest number of payload values; the same on all ranks.
    """

    def __init__(self, communicator: Communicator, *, room: int = PAYLOAD_SIZE) -> None:
        self.communicator = communicator
        self._world = communicator.world_size
        self._tensor = torch.zeros(4 * self._world + room, dtype=torch.float64)
        self._values = self._tensor.numpy()
        self._work: Any = None
        self._phase = 0
        self._entry: tuple[int, int, int] = (0, 0, 0)
        self._payload: Sequence[float] = ()
        self._open: Announced | None = None
        self._strategy = ""  # of what was announced last
        self._sums: list[float] | None = None
        self._heard = -1  # the last phase of which all ranks have said that they are in it
        self._refused: Exception | None = None
        self._unanswered = False  # the phase's announcement
        self._transfers = Counter[tuple[bool, int, int]]()  # that have started: received or sent, other rank, tag

    def start(self, what: Announced, loader_steps: int, *, fingerprint: int = 0, payload: Sequence[float] = ()) -> None:
        """Announce this rank's next action. Call :meth:`agree` before starting the action's collectives.

        ``payload`` is summed over the ranks.

        Raises RanksDisagreeError if this rank has not completed its previous announcement.
        """
        self._start(what, loader_steps, fingerprint, payload)
        self._unanswered = True
        if self._work is None:
            self._post()

    def start_quietly(self, what: Announced, loader_steps: int) -> None:
        """Record this rank's next action without announcing it; wait for its reductions with :meth:`wait` only.

        Raises RanksDisagreeError if this rank has not completed its previous announcement.
        """
        self._start(what, loader_steps, 0, ())

    @property
    def in_phase(self) -> bool:
        """True while some announced collectives have not been started, for example during a backward pass."""
        return self._open is not None

    def interject(self, what: Announced) -> None:
        """Announce a collective while other announced collectives have not started, and wait for the other ranks.

        Raises RanksDisagreeError on every rank if the ranks' actions in this phase differ.
        """
        sums = self.agree() if self._unanswered else self._sums
        before, strategy = (self._entry, self._payload), self._strategy
        self._entry, self._payload, self._strategy = (what.code, *self._entry[1:]), (), what.strategy
        self._sums = None
        if self._work is None:  # else of a long wait before
            self._post()
        self.agree()
        (self._entry, self._payload), self._strategy, self._sums = before, strategy, sums

    def agree(self) -> list[float]:
        """Wait for announcements from all ranks, and return the sums of their payloads.

        Raises RanksDisagreeError on every rank if the ranks' actions differ.
        """
        if self._sums is not None:  # answered before a collective in the middle of the phase
            sums, self._sums = self._sums, None
            return sums
        if self._work is None:
            raise CommunicationFailedError("the announcement was abandoned")
        while True:
            work, self._work = self._work, None
            self.communicator.wait(work)
            if self._all_in_phase():
                self._unanswered = False
                return self._values[4 * self._world :].tolist()  # type: ignore[no-any-return]
            self._post()

    def wait(self, work: Any) -> None:
        """Wait for a reduction after :meth:`start_quietly`; if the wait is long, announce it to the other ranks.

        Raises RanksDisagreeError on every rank if the ranks' actions differ.
        """
        since_s = time.monotonic()
        patience_s = _PATIENCE_S
        try:
            while not self.communicator.wait(work, patience_s=patience_s, since_s=since_s):
                self._speak()
                patience_s = _HEARING_S
        except CommunicationFailedError:
            if self._work is not None and self._work.is_completed():
                self.communicator.wait(self._work)
                self._all_in_phase()  # a rank that heard of a disagreement earlier may have ended because of it
            raise

    def start_transfer(self, peer: int, tag: int, *, received: bool) -> tuple[Announced, int]:
        """Count a message to ``peer`` (from it if ``received``); return the message's announcement and number.

        The announcement is used if the wait is long. Messages are numbered separately for each peer, tag and direction.
        """
        self._transfers[received, peer, tag] += 1
        return transfer(peer, tag, received=received), self._transfers[received, peer, tag]

    def speak_in_transfer(self, what: Announced, number: int, loader_steps: int, since_s: float) -> None:
        """Announce that this rank has been waiting long for a message, and receive the other ranks' announcements.

        Raises RanksDisagreeError if the other rank has returned, or is waiting for a message that this rank has not
        started.
        """
        if time.monotonic() < since_s + _PATIENCE_S or self._open is not None:
            return
        if self._work is not None and not self._work.is_completed():
            return
        received, peer, tag, in_vain = what.transfer
        if self._work is not None:
            work, self._work = self._work, None
            self.communicator.wait(work)
            in_vain = self._waits_in_vain(what)
        before = self._entry, self._payload
        told = transfer(peer, tag, received=received, in_vain=in_vain)
        self._entry, self._payload = (told.code, loader_steps, number), ()
        self._post(timeout_s=_FINISHED_S)
        self.communicator.keep_for(self._work)
        self._entry, self._payload = before

    def _waits_in_vain(self, own: Announced) -> bool:
        """True if the awaited rank has returned, or is itself waiting for a message that this rank has not started.

        Neither proves a deadlock: the message that this rank is waiting for may be on its way, as only the other rank
        knows.

        Raises RanksDisagreeError if the other rank is also waiting in vain, or had returned before.
        """
        codes, (_, awaited, _, _) = self._codes, own.transfer
        told, before = _transfer_of(codes[awaited]), _transfer_of(codes[self.communicator.rank])
        if told is None:
            in_vain = codes[awaited] & 15 == Intent.FINISH
            certain = in_vain and before is not None and before.transfer[3]
        else:
            in_vain = awaited in self._lacking()
            certain = in_vain and told.transfer[3]
        if certain:
            self._refuse_transfer(own.code)
        return in_vain

    def _lacking(self) -> list[int]:
        """Return the ranks that are waiting for a message that this rank has not started."""
        waits = {rank: told.transfer for rank, code in enumerate(self._codes) if (told := _transfer_of(code))}
        return [
            rank
            for rank, (received, peer, tag, _) in waits.items()
            if peer == self.communicator.rank and self._transfers[not received, rank, tag] < self.fingerprints[rank]
        ]

    def _refuse_transfer(self, own_code: int) -> None:
        codes = self._codes
        codes[self.communicator.rank] = own_code
        steps = [int(each) for each in self._values[self._world : 2 * self._world]]
        self._refused = RanksDisagreeError(disagreement(codes, steps))
        raise self._refused

    @property
    def _codes(self) -> list[int]:
        return [int(code) for code in self._values[: self._world]]

    def done(self) -> None:
        """End the phase: all announced collectives have been started."""
        self._open = None

    @property
    def joined_by_idle(self) -> Announced | None:
        """Action, announced by ranks with samples, that ranks without samples can join; None if not announced."""
        return joined_by_idle(self._codes)

    @property
    def fingerprints(self) -> list[int]:
        """Latest parameter fingerprint announced by each rank, or the message number if it is waiting for a message."""
        return [int(value) for value in self._values[2 * self._world : 3 * self._world]]

    def announce_finished(self, what: Announced, loader_steps: int, wait_s: float, fingerprint: int = 0) -> bool:
        """Announce that this rank no longer needs other ranks; return True if all ranks do so within ``wait_s`` [s].

        The announcement remains valid while the group exists: a rank that makes a different announcement later still
        receives it.

        Raises RanksDisagreeError if another rank was seen to continue training during the wait.
        """
        self._start(what, loader_steps, fingerprint, ())
        self._open = None
        until_s = time.monotonic() + wait_s
        self._work = None  # an outdated announcement, after which these are queued
        try:
            # Twice: the first may meet an outdated announcement of another rank, which then makes a second, too.
            standing = [self._stand(), self._stand()]
            while True:
                work, self._tensor = standing.pop(0)
                self._values = self._tensor.numpy()
                if not self.communicator.ends_within(work, until_s - time.monotonic()):
                    return False
                self.communicator.wait(work)
                if self._all_in_phase():
                    self._open = what
                    for work, _ in standing:  # all are here
                        self.communicator.ends_within(work, until_s - time.monotonic())
                    return True
                standing.append(self._stand())
        except CommunicationFailedError:
            return False  # a rank that is gone needs no answer

    def _stand(self) -> tuple[Any, torch.Tensor]:
        """Post an announcement in a separate tensor, where it remains; return the work object and the tensor."""
        self._tensor = torch.zeros_like(self._tensor)
        self._values = self._tensor.numpy()
        self._post(timeout_s=_FINISHED_S)
        self.communicator.keep_for(self._work)
        return self._work, self._tensor

    def check_same_step(self, tags: Sequence[float], note: int) -> bool:
        """Check that all ranks have reduced gradients of the same step; return True if they have read the same data.

        Args:
            note: 1 if this rank's gradients include the last update's, otherwise 0.

        Raises RanksDisagreeError on every rank if the gradients belong to different steps.
        """
        total, squares = tags
        if self._world * squares == total * total:
            return True
        rows = self.communicator.gather_ints([*self._entry[:2], note], with_gradients=True)
        if rows.count(rows[0]) == len(rows):
            return False
        if len({tuple(row[:2]) for row in rows}) == 1:
            self._refused = RanksDisagreeError(notes_differ([row[2] for row in rows], rows[0][1]))
            raise self._refused
        self._refuse([row[0] for row in rows], [row[1] for row in rows])
        return True

    @staticmethod
    def step_tag(loader_steps: int, sample_tag: int = 0) -> tuple[float, float]:
        """Return a number that identifies a step, and its square, to be added to a reduction; both exact in float32.

        Args:
            sample_tag: Tag of a sample that all ranks have read for this step; 0 if each rank reads its own samples.
        """
        tag = float((loader_steps + sample_tag) % _TAGS)
        return tag, tag * tag

    def _start(self, what: Announced, loader_steps: int, fingerprint: int, payload: Sequence[float]) -> None:
        """Start a phase; raises RanksDisagreeError if the previous phase was not completed."""
        if self._refused is not None:
            raise self._refused  # user code has caught it the first time
        if self._open is not None:
            self._refused = RanksDisagreeError(
                f"rank {self.communicator.rank} {self._open}, which was not completed, and now {what}: an exception in "
                "the middle of it was caught. Let errors inside backward() and collectives leave the train function"
            )
            raise self._refused
        self._open, self._sums, self._unanswered = what, None, False
        self._strategy = what.strategy
        self._phase += 1
        self._entry, self._payload = (what.code, loader_steps, fingerprint), payload

    def _post(self, *, timeout_s: float | None = None) -> None:
        values, world, rank = self._values, self._world, self.communicator.rank
        values.fill(0.0)
        values[rank : 4 * world : world] = *self._entry, self._phase
        if self._payload:
            values[4 * world : 4 * world + len(self._payload)] = self._payload
        self._work = self.communicator.all_reduce(self._tensor, timeout_s=timeout_s)

    def _speak(self) -> None:
        """Announce the current action during a long wait, and receive the other ranks' announcements."""
        if self._work is not None:
            if not self._work.is_completed():
                return
            work, self._work = self._work, None
            self.communicator.wait(work)
            if self._all_in_phase():
                self._heard = self._phase
        if self._heard < self._phase:
            self._post(timeout_s=_FINISHED_S)
            self.communicator.keep_for(self._work)  # the others may need no announcement for as long as they train

    def _all_in_phase(self) -> bool:
        """True if all ranks have announced the same phase.

        Raises RanksDisagreeError if, in the same phase, the ranks have announced incompatible actions, or a rank is
        waiting for a message from this rank, whose current action requires all ranks.
        """
        values, world = self._values, self._world
        codes, loader_steps, phases = values[:world], values[world : 2 * world], values[3 * world : 4 * world]
        if self._lacking():
            self._refuse_transfer(self._entry[0])
        if any(_transfer_of(code) for code in self._codes) or (phases != self._phase).any():
            return False
        differ = (codes != codes[0]).any() and self.joined_by_idle is None
        if differ or (loader_steps != loader_steps[0]).any():
            self._refuse([int(code) for code in codes], [int(steps) for steps in loader_steps])
        return True

    def _refuse(self, codes: Sequence[int], loader_steps: Sequence[int]) -> None:
        strategies: Sequence[str] = ()
        intents = {Announced.from_code(code).intent if code else Intent.FINISH for code in codes}
        differ = intents == {Intent.GRADIENTS} and layouts_differ(codes)
        if differ or (Intent.COLLECTIVE in intents and Intent.FINISH not in intents):  # who has returned tells nothing
            strategies = self._strategies()
        self._refused = RanksDisagreeError(disagreement(codes, loader_steps, strategies))
        raise self._refused

    def _strategies(self) -> Sequence[str]:
        """Return the announced strategies or collectives, by rank; empty if any rank does not send its own in time.

        All ranks call this, because all know that they disagree; their announcements are complete.
        """
        told = torch.zeros(self._world, _NAME_BYTES, dtype=torch.uint8)
        name = self._strategy.encode()[:_NAME_BYTES]
        told[self.communicator.rank, : len(name)] = torch.tensor(list(name), dtype=torch.uint8)
        try:
            work = self.communicator.all_reduce(told)
            if not self.communicator.ends_within(work, _NAMES_S):
                self.communicator.mark_broken()
                return ()
            self.communicator.wait(work)
        except CommunicationFailedError:
            return ()
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in told]


def _transfer_of(code: int) -> Announced | None:
    return Announced.from_code(code) if code & 15 == Intent.TRANSFER else None
