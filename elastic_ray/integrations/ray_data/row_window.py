"""Rows of one ordered stream that some reader may still need, and who reads them (pure)."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import deque
from typing import Any

_PAST = sys.maxsize  # position of a reader that has left


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Consecutive rows of a stream that lie in one block."""

    first: int  # position of its first row in the stream, from 0
    rows: int  # how many, at least 1
    block: Any  # what holds them: a reference
    offset: int = 0  # of the first one within the block

    @property
    def end(self) -> int:
        """Position after its last row."""
        return self.first + self.rows

    def behind(self, position: int) -> RowSpan | None:
        """Return the span's rows from ``position``; None if there are none."""
        known = max(0, position - self.first)
        if known >= self.rows:
            return None
        return RowSpan(first=self.first + known, rows=self.rows - known, block=self.block, offset=self.offset + known)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Position of one rank in a stream."""

    client: str  # who asks; unique over all processes of the job
    generation: int  # of the group that it belongs to
    world_size: int  # ranks of that group
    rank: int
    position: int  # rows before this one are not asked for again
    # the train function's run that it belongs to; one such run may have several loaders, and read with all of them in
    # turn
    run: str = ""


class RowWindow:
    """The spans between the slowest reader and the newest block, found by position.

    Args:
        floor: rows before this one are let go as they come.
    """

    def __init__(self, floor: int = 0) -> None:
        self._spans: deque[RowSpan] = deque()
        self._readers: dict[str, Reader] = {}
        self.floor = floor
        self.end = 0
        self.ended = False

    @property
    def held(self) -> tuple[RowSpan, ...]:
        """Spans that are kept, in order."""
        return tuple(self._spans)

    @property
    def generation(self) -> int:
        """Generation of the newest reader; -1 without readers."""
        return max((each.generation for each in self._readers.values()), default=-1)

    def add(self, rows: int, block: Any, offset: int = 0) -> None:
        """Append rows of the stream; none at all is ignored."""
        if rows:
            span = RowSpan(first=self.end, rows=rows, block=block, offset=offset)
            self.end = span.end
            self._spans.append(span)
            self._drop()

    def finish(self) -> None:
        """Finish the stream, which has no further rows."""
        self.ended = True

    def note(self, reader: Reader) -> None:
        """Record a reader's request, and release rows that every rank of the newest group has passed.

        A rank of that group that has not asked yet may need all that is there, so nothing is let go before it has.
        """
        if reader.generation < self.generation:
            return
        there = {**self._readers, reader.client: reader}
        self._readers = {client: each for client, each in there.items() if each.generation == reader.generation}
        self._raise_floor()

    def leave(self, client: str) -> bool:
        """Remove a reader that has no further questions; True if it was the last one."""
        known = self._readers.get(client)
        if known is None:
            return False
        self._readers[client] = dataclasses.replace(known, position=_PAST)
        self._raise_floor()
        return all(each.position == _PAST for each in self._readers.values())

    def spans(self, first: int, end: int) -> tuple[RowSpan, ...]:
        """Return the spans that hold any row of ``first`` to ``end``, the latter excluded."""
        later = itertools.dropwhile(lambda each: each.end <= first, self._spans)
        return tuple(itertools.takewhile(lambda each: each.first < end, later))

    def ahead(self, row: int) -> int:
        """Return the number of spans that begin at ``row`` or later."""
        return sum(1 for _ in itertools.takewhile(lambda each: each.first >= row, reversed(self._spans)))

    def _raise_floor(self) -> None:
        readers = self._readers.values()
        if {each.rank for each in readers} == set(range(max(each.world_size for each in readers))):
            self.floor = max(self.floor, min(each.position for each in readers))
            self._drop()

    def _drop(self) -> None:
        while self._spans and self._spans[0].end <= self.floor:
            self._spans.popleft()


class Readers:
    """Streams that each client reads.

    A train function that evaluates within its loop reads a stream with another loader, maybe in a newer group than it
    has last asked for the loop's rows in: a client whose run is heard of in a group is there in that group.
    """

    def __init__(self) -> None:
        self._reads: dict[str, tuple[Reader, object]] = {}
        self._heard: dict[str, int] = {}

    def note(self, reader: Reader, stream: object) -> object | None:
        """Record a client's request for rows of a stream.

        Return the stream that it has read before, where that is another.
        """
        _, before = self._reads.get(reader.client, (None, None))
        self._reads[reader.client] = reader, stream
        self._heard[reader.run] = max(reader.generation, self._heard.get(reader.run, reader.generation))
        return before if before is not stream else None

    def leave(self, client: str) -> object | None:
        """Remove a client that has no further questions; return the stream that it has read."""
        return self._reads.pop(client, (None, None))[1]

    def forget(self, stream: object, *, gone: bool) -> None:
        """Discard a closed stream; ``gone`` if none of its readers is still there."""
        for client, (reader, read) in tuple(self._reads.items()):
            if read is stream and gone:
                del self._reads[client]
            elif read is stream:
                self._reads[client] = reader, None

    def is_latest(self, reader: Reader) -> bool:
        """True if the client still waits for this request: it has not left or sent another."""
        return self._reads.get(reader.client, (None, None))[0] is reader

    def has_others(self, stream: object, reader: Reader) -> bool:
        """True if other living clients, as far as the reader's group knows, read the stream."""
        there = {run for run, generation in self._heard.items() if generation >= reader.generation} | {reader.run}
        return any(
            each.client != reader.client and each.run in there for each, read in self._reads.values() if read is stream
        )
