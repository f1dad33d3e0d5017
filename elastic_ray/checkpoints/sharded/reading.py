"""SHELL: reads automatic checkpoints with any number of ranks, without unpickling (torch)."""

from __future__ import annotations

import array
import functools
import hashlib
import logging
import math
import posixpath
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from elastic_ray.checkpoints.automatic import CorruptStateError, StateFile
from elastic_ray.checkpoints.checked_files import CHUNK_BYTES
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.manifest import MANIFEST, Manifest, ManifestError, StoredTensor, part_name
from elastic_ray.state.codec import dtype_of
from elastic_ray.state.tree import unpack
from elastic_ray.state.unread import UnreadTensor, is_divided

_LARGEST_MANIFEST_BYTES = 1 << 28
_LEAST_BYTES = 1 << 16
_PAUSES_S = (0.2, 1.0, 3.0)
_Found = TypeVar("_Found")
_IsPutOff: TypeAlias = Callable[[Mapping[str, Any], StoredTensor], bool]
logger = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 18
_READ_BYTES = 4 << 20  # at once, in whole blocks


def open_checkpoint(storage: RunStorage, state: StateFile, *, least_bytes: int = _LEAST_BYTES) -> dict[str, Any]:
    """Open an automatic checkpoint and return its captured states on the CPU.

    Large tensors of which each rank needs only its rows or tiles are returned as `UnreadTensor`, to be read later. All
    parts are read once and compared with their checksums; they must stay in storage until these tensors are read.
    """

    def is_put_off(tree: Mapping[str, Any], tensor: StoredTensor) -> bool:
        return is_divided(tree, tensor.path) and math.prod(tensor.shape) * _itemsize(tensor) >= least_bytes

    try:
        return _patiently(state.path, lambda: _read_parts(storage, state, is_put_off))
    except ManifestError as error:
        raise CorruptStateError(f"{state.path} is no state of ours: {error}") from error


def _patiently(path: str, read: Callable[[], _Found]) -> _Found:
    """Retry a read while storage fails, so that a short failure does not lose the progress since an earlier state."""
    try:
        for pause_s in _PAUSES_S:
            try:
                return read()
            except (FileNotFoundError, IsADirectoryError):
                raise
            except OSError as error:
                logger.warning("%s cannot be read, trying again in %g s: %s", path, pause_s, error)
                time.sleep(pause_s)
        return read()
    except OSError as error:
        raise CorruptStateError(f"{path} cannot be read: {error}") from error


def read_manifest(storage: RunStorage, state: StateFile) -> Manifest:
    """Read the manifest of a checkpoint."""
    path = posixpath.join(state.path, MANIFEST)
    size = _size(storage, path)
    if size > _LARGEST_MANIFEST_BYTES:
        raise CorruptStateError(f"{path} has {size} bytes, more than the {_LARGEST_MANIFEST_BYTES} of any manifest")
    with storage.filesystem.open_input_stream(path) as raw:
        content = bytes(raw.readall())
    if hashlib.sha256(content).hexdigest() != state.sha256:
        raise CorruptStateError(f"{path} does not have the checksum of what was written")
    manifest = Manifest.from_bytes(content)
    if len(manifest.files) != state.parts or manifest.steps != state.steps:
        raise CorruptStateError(
            f"{path} is of step {manifest.steps} and {len(manifest.files)} ranks, but its note says step {state.steps} "
            f"and {state.parts} ranks"
        )
    return manifest


def check_whole(storage: RunStorage, state: StateFile) -> Manifest:
    """Read all files of an automatic checkpoint, in little memory, and return its manifest.

    Raises CorruptStateError like `open_checkpoint`.
    """

    def read() -> Manifest:
        manifest = read_manifest(storage, state)
        for rank, file in enumerate(_parts(storage, state, manifest)):
            _scatter(file, manifest.files[rank][0])
        return manifest

    try:
        return _patiently(state.path, read)
    except ManifestError as error:
        raise CorruptStateError(f"{state.path} is no state of ours: {error}") from error


def _parts(storage: RunStorage, state: StateFile, manifest: Manifest) -> list[PartFile]:
    """Return a checkpoint's parts, in rank order. Raises CorruptStateError if a part's size has changed."""
    files = [PartFile(storage, posixpath.join(state.path, part_name(rank))) for rank in range(len(manifest.files))]
    for file, (_, size) in zip(files, manifest.files, strict=True):
        if (there := _size(storage, file.path)) != size:
            raise CorruptStateError(f"{file.path} has {there} bytes, but {size} were written")
    return files


def _scatter(file: PartFile, sha256: str, pieces: Sequence[tuple[int, memoryview]] = ()) -> None:
    """Read a part into ``pieces`` (see `PartFile.scatter`). Raises CorruptStateError if its checksum differs."""
    if file.scatter(pieces) != sha256:
        raise CorruptStateError(f"{file.path} does not have the checksum of what was written")


def _read_parts(storage: RunStorage, state: StateFile, is_put_off: _IsPutOff) -> dict[str, Any]:
    """Read a sharded checkpoint like :func:`open_checkpoint`; also raises ManifestError and OSError."""
    manifest = read_manifest(storage, state)
    files = _parts(storage, state, manifest)  # before memory is taken for them
    found: list[Tensor | UnreadTensor] = []
    pieces: dict[int, list[tuple[int, memoryview]]] = {}
    for each in manifest.tensors:
        if is_put_off(manifest.tree, each):
            elements = functools.partial(_elements, state.path, files, each)
            found.append(UnreadTensor(shape=each.shape, dtype=dtype_of(each.dtype), elements=elements))
            continue
        content = torch.empty(math.prod(each.shape) * _itemsize(each), dtype=torch.uint8)
        found.append(content.view(dtype_of(each.dtype)).reshape(each.shape))
        view = content.numpy().data
        for rank, piece in each.pieces:
            begin = piece.start * _itemsize(each)
            pieces.setdefault(rank, []).append((piece.offset, view[begin : begin + piece.nbytes]))
    for rank, (sha256, _) in enumerate(manifest.files):
        _scatter(files[rank], sha256, pieces.get(rank, []))
    try:
        states: dict[str, Any] = unpack(manifest.tree, found)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ManifestError(f"its tensors are invalid: {error}") from error
    return states


def _elements(path: str, files: Sequence[PartFile], tensor: StoredTensor, start: int, stop: int) -> Tensor:
    """Return consecutive elements of a tensor from the parts that contain them; see `UnreadTensor`."""
    itemsize = _itemsize(tensor)
    content = torch.empty((stop - start) * itemsize, dtype=torch.uint8)
    view = content.numpy().data

    def read() -> None:
        for rank, piece in tensor.pieces:
            first, last = max(start, piece.start), min(stop, piece.start + piece.length)
            if first < last:
                offset = piece.offset + (first - piece.start) * itemsize
                files[rank].read(offset, view[(first - start) * itemsize : (last - start) * itemsize])

    _patiently(path, read)
    return content.view(dtype_of(tensor.dtype))


def _itemsize(tensor: StoredTensor) -> int:
    return dtype_of(tensor.dtype).itemsize


def _size(storage: RunStorage, path: str) -> int:
    found = storage.filesystem.get_file_info(path)
    if not found.is_file:
        raise FileNotFoundError(f"there is no file {path}")
    return int(found.size)


class PartFile:
    """Reader of one rank's part of a checkpoint, which detects file changes after the first complete read."""

    def __init__(self, storage: RunStorage, path: str) -> None:
        self._storage, self.path = storage, path
        self._size = 0
        self._sums = array.array("I")

    def scatter(self, pieces: Sequence[tuple[int, memoryview]] = ()) -> str:
        """Read the entire file, copy the given byte ranges into buffers, and return its SHA-256 in hexadecimal."""
        digest, at = hashlib.sha256(), 0
        waiting = sorted(pieces, key=lambda piece: piece[0])
        blocks = _Blocks()
        with self._storage.filesystem.open_input_stream(self.path) as raw:
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
        """Read bytes of the file into `target` in few blocks of memory; call :meth:`scatter` first."""
        end = offset + len(target)
        at, stop = offset // BLOCK_BYTES * BLOCK_BYTES, min(self._size, -(-end // BLOCK_BYTES) * BLOCK_BYTES)
        with self._storage.filesystem.open_input_file(self.path) as raw:
            while at < stop:
                count = min(_READ_BYTES, stop - at)
                chunk = memoryview(raw.read_at(count, at))
                blocks = _Blocks()
                blocks.add(chunk)
                first, found = at // BLOCK_BYTES, blocks.sums()
                if len(chunk) != count or found != self._sums[first : first + len(found)]:
                    raise CorruptStateError(
                        f"{self.path} has changed since it was compared with its checksum: start the job again; it "
                        "then continues from the last complete checkpoint"
                    )
                _put(target, offset, chunk, at)
                at += count


class _Blocks:
    """Checksums of consecutive blocks of data."""

    def __init__(self) -> None:
        self._sums, self._running, self._left = array.array("I"), 0, BLOCK_BYTES

    def add(self, data: memoryview) -> None:
        """Add the next bytes."""
        while data:
            head, data = data[: self._left], data[self._left :]
            self._running, self._left = zlib.crc32(head, self._running), self._left - len(head)
            if not self._left:
                self._sums.append(self._running)
                self._running, self._left = 0, BLOCK_BYTES

    def sums(self) -> array.array[int]:
        """Return each block's checksum; the last block may be short."""
        return self._sums + array.array("I", [self._running] if self._left < BLOCK_BYTES else [])


def _put(target: memoryview, offset: int, chunk: memoryview, at: int) -> None:
    """Copy the overlap of a chunk (at position ``at`` in a file) and a target (at ``offset``) into the target."""
    first, last = max(offset, at), min(offset + len(target), at + len(chunk))
    target[first - offset : last - offset] = chunk[first - at : last - at]
