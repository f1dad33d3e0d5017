"""SHELL: the file of one rank's part: read through once, and from then on by ranges."""

from __future__ import annotations

import array
import hashlib
import zlib
from collections.abc import Sequence

from elastic_ray.checkpoints.automatic import CorruptStateError
from elastic_ray.checkpoints.checked_files import CHUNK_BYTES
from elastic_ray.checkpoints.run_directory import RunStorage

BLOCK_BYTES = 1 << 18
_READ_BYTES = 4 << 20  # at once, in whole blocks


class PartFile:
    """See the module's text. What is read later is compared, block by block, with what was read through.

    Args:
        storage: the run.
        path: of the file.
    """

    def __init__(self, storage: RunStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self._size = 0
        self._sums = array.array("I")

    def scatter(self, pieces: Sequence[tuple[int, memoryview]] = ()) -> str:
        """Read all of the file, and put pieces of it where they belong; returns its SHA-256, in hexadecimal.

        Args:
            pieces: where the bytes of each begin in the file, and where they go.
        """
        digest, at = hashlib.sha256(), 0
        waiting = sorted(pieces, key=lambda piece: piece[0])
        blocks = _Blocks()
        with self._storage.filesystem.open_input_stream(self._path) as raw:
            while data := raw.read(CHUNK_BYTES):
                chunk = memoryview(data)
                digest.update(chunk)
                blocks.add(chunk)
                end, left = at + len(chunk), []
                for number, (offset, target) in enumerate(waiting):
                    if offset >= end:
                        left += waiting[number:]
                        break
                    _put(target, offset, chunk, at)
                    if offset + len(target) > end:
                        left.append((offset, target))
                waiting, at = left, end
        self._size, self._sums = at, blocks.sums()
        return digest.hexdigest()

    def read(self, offset: int, target: memoryview) -> None:
        """Bytes of the file, once it was read through, with no more memory than a few blocks.

        Args:
            offset: where they begin in the file.
            target: where they go; they lie within the file.

        Raises:
            CorruptStateError: they are other ones than then. OSError: they cannot be read.
        """
        end = offset + len(target)
        at, stop = offset // BLOCK_BYTES * BLOCK_BYTES, min(self._size, -(-end // BLOCK_BYTES) * BLOCK_BYTES)
        with self._storage.filesystem.open_input_file(self._path) as raw:
            while at < stop:
                count = min(_READ_BYTES, stop - at)
                chunk = memoryview(raw.read_at(count, at))
                blocks = _Blocks()
                blocks.add(chunk)
                first, found = at // BLOCK_BYTES, blocks.sums()
                if len(chunk) != count or found != self._sums[first : first + len(found)]:
                    raise CorruptStateError(
                        f"{self._path} has changed since it was compared with its checksum: start the job again, which "
                        "then goes on from the last checkpoint that is whole"
                    )
                _put(target, offset, chunk, at)
                at += count


class _Blocks:
    """Check sums of the blocks of what passes by."""

    def __init__(self) -> None:
        self._sums, self._running, self._left = array.array("I"), 0, BLOCK_BYTES

    def add(self, data: memoryview) -> None:
        """The bytes that follow."""
        while data:
            head, data = data[: self._left], data[self._left :]
            self._running, self._left = zlib.crc32(head, self._running), self._left - len(head)
            if not self._left:
                self._sums.append(self._running)
                self._running, self._left = 0, BLOCK_BYTES

    def sums(self) -> array.array[int]:
        """Of all blocks; no bytes follow."""
        return self._sums + array.array("I", [self._running] if self._left < BLOCK_BYTES else [])


def _put(target: memoryview, offset: int, chunk: memoryview, at: int) -> None:
    """Copy what a chunk, which begins at ``at`` in a file, has of a target, which begins at ``offset``."""
    first, last = max(offset, at), min(offset + len(target), at + len(chunk))
    target[first - offset : last - offset] = chunk[first - at : last - at]
