"""Reasons for decisions: a cause with figures, and its conversion to text (pure)."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any

MOST_WORDS = 15
"""Words of a reason in a listing, an event or on the page; what is longer is cut there, and whole in ``explain``."""


class Cause(str, enum.Enum):
    """Cause of a job's size; ``value`` is its name in recordings, ``words`` its text with placeholders for facts."""

    words: str

    def __new__(cls, kind: str, words: str) -> Cause:
        """Return a member whose value is its name in recordings."""
        member = str.__new__(cls, kind)
        member._value_, member.words = kind, words
        return member

    POLICY = "policy", "{0}: {1}"
    DECIDED = "decided", "decided by {0}"
    PAUSED = "paused", "{0}"
    ARRIVED = "arrived", "has just arrived"
    CAME = "came", "keeps the workers that it came with"
    SILENT = "silent", "no heartbeat for {0:.1f} s"
    REFUSED = "refused", "policy {0!r} broke rule {1!r}, the last allocation stays"
    IMPOSSIBLE = "impossible", "no node fits: {0}"
    AUTOSCALER = "autoscaler", "waits for an autoscaler: {0}"
    HELD = "held", "held at {0} by its user"
    HELD_IN_PART = "held in part", "held at {0} by its user, of which {1} fit now"
    DRAIN = "drain", "{0} drain{1}"
    GONE = "gone", "{0} left the cluster"
    AVOIDED = "avoided", "avoids {0}: workers failed there"
    SLOW = "slow", "slow nodes are left"
    NOISE = "noise", "measured noise keeps the size: its speed varies by {0:.0%}"
    QUOTA = "quota", "quota: tenant {0!r} may use {1:g} {2} at most"
    SHARE = "share", "tenant {0!r} has its share, weight {1:g}"
    PRIORITY = "priority", "jobs of higher priority go first (yours: {0})"
    SECURED = "secured", "keeps its minimum: it may not be stopped for this"
    NOT_BESIDE = "not beside", "waits: jobs that may not be stopped leave no room for its minimum"
    ON_DEMAND = "on demand", "waits: on-demand nodes have no room for {0} of its workers"
    ON_SPOT = "on spot", "on-demand nodes lack room: fewer than {0} of its workers are there"
    ON_DEMAND_KEPT = "on demand kept", "waits: on-demand nodes are kept for the minimum of {0}"
    DEADLINE = "deadline", "deadline: {0} or more meet it"
    NO_DEADLINE = "no deadline", "deadline: {0}"
    UTILITY = "utility", "utility: more than {0} cost more than they gain"
    SIZES = "sizes", "its sizes allow {0} of the {1} workers that fit"
    NO_ROOM = "no room", "waits: needs at least {0}, {1} fit"
    MEMORY = "memory", "memory bound: needs at least {0}, {1} fit"
    EARLIER = "earlier", "waits: jobs submitted before it have all slots"
    SCATTERED = "scattered", "room is scattered: {0} of {1} workers fit"
    SHORTER = "shorter", "{0} with less left go first (yours: {1})"
    TAKEN = "taken", "{0} gets {1} {2}"
    FULL = "full", "{0}: no slot is left"
    MOST = "most", "{0}, the most it can use now"
    NOT_WORTH = "not worth", "{0}: one more is not worth its pause"
    STARTS = "starts", "starts with {0}, {1}"
    EXPLORES = "explores", "tries {0}, no model yet"
    GROWTH = "growth", "growth pays: {0:.3g} x the speed for {1:.2g} s of pause"
    MOVES = "moves", "moves: {0:.3g} x the speed for {1:.2g} s of pause"
    FEWER = "fewer", "fewer workers are as good: {0:.3g} x the speed"
    OTHER_TYPES = "other types", "with {0}, which no other job needs"
    WISH = "wish", "its policy asked for {0}, {1} of them from slots of no use to others"
    WISH_IN_PART = "wish in part", "its policy asked for {0}, of which {1} are to be had"
    # of the cluster's size
    LEAST_COST = "least cost", "{0}: {1} on {2}"
    NO_PROGRESS = "no progress", "no size is known to make progress: {0}"
    BAND = "band", "utility {0:.2f} is {1} its band: {2}"
    NEEDED = "needed", "{0}: {1}"
    UNUSED = "unused", "no job needs them"
    CLOSED = "closed", "no more for now: {0}"
    UNMET = "unmet", "its {0} cannot be met: {1}"
    UNPLANNED = "unplanned", "its {0} cannot be planned for: its length is not known yet"
    PASSED = "passed", "its deadline has passed"
    NO_NODE = "no node", "{0} of {1} workers find no node within the limits of the node types"


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Reason for a job's number of workers; its ``str`` has at most ``MOST_WORDS`` words."""

    cause: Cause
    # what its words have places for
    facts: tuple[Any, ...] = ()  # texts and numbers
    figures: str = ""  # gain, loss and what else was weighed, for ``explain``; empty for none
    unit: int = 1  # processes of each worker that it counts

    @property
    def words(self) -> str:
        """Text of the cause with its facts, without figures (the values weighed in the decision)."""
        if self.unit == 1 or self.cause is Cause.POLICY:
            return self.cause.words.format(*self.facts)
        facts = (each.replace("worker", "unit") if isinstance(each, str) else each for each in self.facts)
        return self.cause.words.replace("worker", "unit").format(*facts)

    def __str__(self) -> str:
        said = self.words.split()
        return " ".join(said) if len(said) <= MOST_WORDS else " ".join([*said[: MOST_WORDS - 1], "..."])

    @property
    def explained(self) -> str:
        """Text of the cause with its facts and all figures."""
        whole = f"a unit is {self.unit} workers, on one node if one has room" if self.unit > 1 else ""
        return "; ".join(each for each in (self.words, self.figures, whole) if each)

    def of_unit(self, unit: int) -> Reason:
        """Return the reason with its numbers counted in units (workers) of ``unit`` processes each."""
        return self if unit == self.unit else dataclasses.replace(self, unit=unit)

    def with_figures(self, figures: str) -> Reason:
        """Return the reason with ``figures`` (text with values weighed in the decision) appended to its own."""
        return dataclasses.replace(self, figures="; ".join(filter(None, (self.figures, figures))))

    def because(self, cause: Reason | None) -> Reason:
        """Return ``cause`` with this reason's full text added to its figures, or this reason if ``cause`` is None."""
        if cause is None:
            return self
        return cause.with_figures(self.explained)


def nodes_of(node_ids: Collection[str]) -> tuple[str, str]:
    """Return a phrase that names these nodes as the subject of a sentence, and the ending of its verb ("s" or "")."""
    several = len(node_ids) > 1
    return (f"{len(node_ids)} nodes", "") if several else (f"node {next(iter(node_ids))[:8]}", "s")
