"""SHELL: automatic checkpoints of either kind, read by any number of ranks; nothing is unpickled (torch)."""

from __future__ import annotations

import hashlib
import logging
import math
import posixpath
import time
from collections.abc import Iterator
from typing import Any

import torch

from elastic_ray.checkpoints.automatic import CorruptStateError, StateFile
from elastic_ray.checkpoints.checked_files import CHUNK_BYTES
from elastic_ray.checkpoints.format import read_state
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.manifest import MANIFEST, Manifest, ManifestError, part_name
from elastic_ray.state.codec import dtype_of
from elastic_ray.state.tree import unpack

_LARGEST_MANIFEST_BYTES = 1 << 28
_PAUSES_S = (0.2, 1.0, 3.0)

logger = logging.getLogger(__name__)


def read_checkpoint(storage: RunStorage, state: StateFile) -> dict[str, Any]:
    """The captured states of an automatic checkpoint, one file's or all parts', on the CPU.

    Raises:
        CorruptStateError: it is not what was written, or cannot be read, also after a while.
    """
    if not state.parts:
        return read_state(storage, state)
    try:
        for pause_s in _PAUSES_S:
            try:
                return _read_parts(storage, state)
            except (FileNotFoundError, IsADirectoryError):
                raise
            except OSError as error:  # a bad moment must not cost the progress since the state before this one
                logger.warning("%s cannot be read, trying again in %g s: %s", state.path, pause_s, error)
                time.sleep(pause_s)
        return _read_parts(storage, state)
    except OSError as error:
        raise CorruptStateError(f"{state.path} cannot be read: {error}") from error
    except ManifestError as error:
        raise CorruptStateError(f"{state.path} is no state of ours: {error}") from error


def read_manifest(storage: RunStorage, state: StateFile) -> Manifest:
    """What a sharded checkpoint holds.

    Raises:
        CorruptStateError, ManifestError, OSError: it is not what was written.
    """
    path = posixpath.join(state.path, MANIFEST)
    size = _size(storage, path)
    if size > _LARGEST_MANIFEST_BYTES:
        raise CorruptStateError(f"{path} has {size} bytes, more than the {_LARGEST_MANIFEST_BYTES} of any manifest")
    with storage.filesystem.open_input_stream(path) as raw:
        content = bytes(raw.readall())
    if hashlib.sha256(content).hexdigest() != state.sha256:
        raise CorruptStateError(f"{path} has another checksum than what was written")
    manifest = Manifest.from_bytes(content)
    if len(manifest.files) != state.parts or manifest.steps != state.steps:
        raise CorruptStateError(
            f"{path} is of step {manifest.steps} and {len(manifest.files)} ranks, but its note says step {state.steps} "
            f"and {state.parts} ranks"
        )
    return manifest


def _read_parts(storage: RunStorage, state: StateFile) -> dict[str, Any]:
    """As :func:`read_checkpoint`; raises also ManifestError and OSError."""
    manifest = read_manifest(storage, state)
    for rank, (_, size) in enumerate(manifest.files):  # before memory is taken for them
        path = posixpath.join(state.path, part_name(rank))
        if (there := _size(storage, path)) != size:
            raise CorruptStateError(f"{path} has {there} bytes, but {size} were written")
    tensors = [
        torch.empty(math.prod(each.shape) * dtype_of(each.dtype).itemsize, dtype=torch.uint8)
        for each in manifest.tensors
    ]
    pieces: dict[int, list[tuple[int, memoryview]]] = {}
    for each, content in zip(manifest.tensors, tensors, strict=True):
        view, itemsize = content.numpy().data, dtype_of(each.dtype).itemsize
        for rank, piece in each.pieces:
            begin = piece.start * itemsize
            pieces.setdefault(rank, []).append((piece.offset, view[begin : begin + piece.nbytes]))
    for rank, (sha256, _) in enumerate(manifest.files):
        path = posixpath.join(state.path, part_name(rank))
        if _scatter(storage, path, pieces.get(rank, [])) != sha256:
            raise CorruptStateError(f"{path} has another checksum than what was written")
    whole = [
        content.view(dtype_of(each.dtype)).reshape(each.shape)
        for each, content in zip(manifest.tensors, tensors, strict=True)
    ]
    try:
        found: dict[str, Any] = unpack(manifest.tree, whole)
    except (RuntimeError, TypeError, IndexError) as error:
        raise ManifestError(f"its tensors are none: {error}") from error
    return found


def _scatter(storage: RunStorage, path: str, pieces: list[tuple[int, memoryview]]) -> str:
    """Read a file once, and put pieces of it where they belong; returns its checksum.

    Args:
        storage: the run.
        path: of the file.
        pieces: where the bytes of each begin in the file, and where they go.
    """
    digest, at = hashlib.sha256(), 0
    waiting = sorted(pieces, key=lambda piece: piece[0])
    for chunk in _chunks(storage, path):
        digest.update(chunk)
        end, left = at + len(chunk), []
        for number, (offset, target) in enumerate(waiting):
            if offset >= end:
                left += waiting[number:]
                break
            first, last = max(offset, at), min(offset + len(target), end)
            target[first - offset : last - offset] = chunk[first - at : last - at]
            if offset + len(target) > end:
                left.append((offset, target))
        waiting, at = left, end
    return digest.hexdigest()


def _chunks(storage: RunStorage, path: str) -> Iterator[memoryview]:
    with storage.filesystem.open_input_stream(path) as raw:
        while chunk := raw.read(CHUNK_BYTES):
            yield memoryview(chunk)


def _size(storage: RunStorage, path: str) -> int:
    """Of a file [bytes]; raises FileNotFoundError where there is none."""
    found = storage.filesystem.get_file_info(path)
    if not found.is_file:
        raise FileNotFoundError(f"there is no file {path}")
    return int(found.size)
