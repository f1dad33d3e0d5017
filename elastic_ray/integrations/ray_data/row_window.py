"""Window of an ordered stream's rows that some reader may still need, and the stream's readers (pure)."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import deque
from typing import Any

_PAST = sys.maxsize  # position of a reader that has left


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Consecutive rows of a stream (a dataset's rows for one epoch, in order) that are stored in one block."""

    first: int  # position of its first row in the stream, from 0
    rows: int  # how many, at least 1
    block: Any  # what holds them: a reference
    offset: int = 0  # of the first one within the block

    @property
    def end(self) -> int:
        """Position in the stream after the last row of the span."""
        return self.first + self.rows

    def behind(self, position: int) -> RowSpan | None:
        """Return the part of the span from stream position ``position`` on; None if no row of the span remains."""
        known = max(0, position - self.first)
        if known >= self.rows:
            return None
        return RowSpan(first=self.first + known, rows=self.rows - known, block=self.block, offset=self.offset + known)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Identity of one rank that reads a stream, and its position in the stream."""

    client: str  # who asks; unique over all processes of the job
    generation: int  # of the group that it belongs to
    world_size: int  # ranks of that group
    rank: int
    position: int  # rows before this one are not asked for again
    # the train function's run that it belongs to; one such run may have several loaders, and read with all of them in
    # turn
    run: str = ""


class RowWindow:
    """Spans (runs of rows) of a stream from the slowest reader's position to the newest block, in order."""

    def __init__(self, floor: int = 0) -> None:
        self._spans: deque[RowSpan] = deque()
        self._readers: dict[str, Reader] = {}
        self.floor = floor
        self.end = 0
        self.ended = False

    @property
    def held(self) -> tuple[RowSpan, ...]:
        """Spans (runs of rows in one block) that are not released yet, in order."""
        return tuple(self._spans)

    @property
    def generation(self) -> int:
        """Generation (number of the group of ranks) of the newest reader; -1 without readers."""
        return max((each.generation for each in self._readers.values()), default=-1)

    def add(self, rows: int, block: Any, offset: int = 0) -> None:
        """Append ``rows`` rows of a block, the first at index ``offset`` in the block; 0 rows are ignored."""
        if rows:
            span = RowSpan(first=self.end, rows=rows, block=block, offset=offset)
            self.end = span.end
            self._spans.append(span)
            self._drop()

    def finish(self) -> None:
        """Mark the stream as complete: no further rows will be added."""
        self.ended = True

    def record(self, reader: Reader) -> None:
        """Record a reader's position; release rows that all ranks of the newest group, each heard of, have passed."""
        if reader.generation < self.generation:
            return
        there = {**self._readers, reader.client: reader}
        self._readers = {client: each for client, each in there.items() if each.generation == reader.generation}
        self._raise_floor()

    def leave(self, client: str) -> bool:
        """Mark the reader of ``client`` as finished; return True if all readers are finished."""
        known = self._readers.get(client)
        if known is None:
            return False
        self._readers[client] = dataclasses.replace(known, position=_PAST)
        self._raise_floor()
        return all(each.position == _PAST for each in self._readers.values())

    def spans(self, first: int, end: int) -> tuple[RowSpan, ...]:
        """Return the spans that contain any row in the half-open range from ``first`` to ``end``."""
        later = itertools.dropwhile(lambda each: each.end <= first, self._spans)
        return tuple(itertools.takewhile(lambda each: each.first < end, later))

    def ahead(self, row: int) -> int:
        """Return the number of held spans that start at stream position ``row`` or later."""
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
    """Registry of the clients (loaders on one rank) that read datasets, and of the stream that each client reads.

    Evaluation within a training loop reads with a second loader, possibly in a newer group than the last request of the
    training loader. A request from any client of a run therefore shows that all clients of the run are alive.
    """

    def __init__(self) -> None:
        self._reads: dict[str, tuple[Reader, object]] = {}
        self._heard: dict[str, int] = {}

    def record(self, reader: Reader, stream: object) -> object | None:
        """Record that a client requests rows from a stream; return the other stream that it read before, or None."""
        _, before = self._reads.get(reader.client, (None, None))
        self._reads[reader.client] = reader, stream
        self._heard[reader.run] = max(reader.generation, self._heard.get(reader.run, reader.generation))
        return before if before is not stream else None

    def leave(self, client: str) -> object | None:
        """Remove a client that will send no further requests; return the stream it was reading, or None."""
        return self._reads.pop(client, (None, None))[1]

    def discard(self, stream: object, *, gone: bool) -> None:
        """Detach the clients of a closed stream, so that they can read another; remove these clients if ``gone``."""
        for client, (reader, read) in tuple(self._reads.items()):
            if read is stream and gone:
                del self._reads[client]
            elif read is stream:
                self._reads[client] = reader, None

    def is_latest(self, reader: Reader) -> bool:
        """True if ``reader`` is the latest request of its client, and that client has not left."""
        return self._reads.get(reader.client, (None, None))[0] is reader

    def has_others(self, stream: object, reader: Reader) -> bool:
        """True if a living client, other than the client of ``reader``, reads the stream."""
        there = {run for run, generation in self._heard.items() if generation >= reader.generation} | {reader.run}
        return any(
            each.client != reader.client and each.run in there for each, read in self._reads.values() if read is stream
        )
