"""Contents of a sharded checkpoint's files: each rank's account of its part, and the manifest for all parts.

Both are plain values in the codec of ``elastic_ray/state/codec.py``: reading them runs no code. Sizes given in a file
are checked against storage before any memory is allocated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_ray.state.codec import SparseIndex, TensorIndex, decode, dtype_of, encode

VERSION = 1
MANIFEST = "manifest.bin"
TORCH_METADATA = ".metadata"
_MOST_DIMENSIONS = 64
_DIGEST_BYTES = 32
_PART = re.compile(r"__([0-9]{1,6})_0\.distcp")

Path = tuple[Any, ...]


class ManifestError(ValueError):
    """Error raised if a checkpoint's manifest, or a rank's description of its part, has invalid contents."""


def part_name(rank: int) -> str:
    """Return the file name of a rank's part, in the style of torch's distributed checkpoints."""
    return f"__{rank}_0.distcp"


def account_name(rank: int) -> str:
    """Return the name of the file that describes a rank's part; the file is written after the part."""
    return f"part_{rank}.bin"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """Consecutive elements of a tensor in a file.

    Attributes:
        start: index of the first element in the flattened tensor.
        offset: position of the elements' first byte in the file.
        archive: position and size [bytes] of the torch archive in the file that contains the elements.
    """

    start: int
    length: int
    offset: int
    nbytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    archive: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and its pieces, each with the rank whose part contains it."""

    path: Path  # keys that lead to it in the tree of all states
    shape: tuple[int, ...]
    dtype: str  # its name, as "float32"
    pieces: tuple[tuple[int, StoredPiece], ...]  # they cover the tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Description of one rank's part of a checkpoint."""

    rank: int
    steps: int  # optimizer steps that its state holds
    sha256: str  # of its file, in hexadecimal
    size: int  # of its file [bytes]
    tensors: tuple[StoredTensor, ...]  # pieces that are in it
    plain: tuple[tuple[Path, Any], ...] = ()  # values that are no tensors, by path; the first rank's are in its tree
    tree: Any = None  # the first rank's tree of all states with indices of ``tensors``; None from others
    # of the first rank: where torch's archive of each plain value is in the file
    values: tuple[tuple[Path, tuple[int, int]], ...] = ()

    def to_bytes(self) -> bytes:
        """Return the description as bytes for :meth:`from_bytes`, preceded by their SHA-256 digest."""
        told = {"version": VERSION, "rank": self.rank, "steps": self.steps, "sha256": self.sha256, "size": self.size}
        content = encode({**told, "tensors": _plain_tensors(self.tensors), "plain": list(self.plain)})
        return hashlib.sha256(content).digest() + content

    @classmethod
    def from_bytes(cls, content: bytes) -> Part | None:
        """Parse the output of :meth:`to_bytes`; return None if the bytes are not complete yet."""
        if hashlib.sha256(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
            return None
        told = _read(content[_DIGEST_BYTES:])
        try:
            return cls(
                rank=_whole(told["rank"]),
                steps=_whole(told["steps"]),
                sha256=str(told["sha256"]),
                size=_whole(told["size"]),
                tensors=_tensors(told["tensors"]),
                plain=tuple((tuple(path), value) for path, value in told["plain"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"a rank's record of its part is incomplete: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of a sharded checkpoint: its files, state tree and tensors."""

    steps: int  # optimizer steps
    files: tuple[tuple[str, int], ...]  # checksum and size [bytes] of each rank's part, by rank
    tree: dict[str, Any]  # of all states, with indices of tensors
    tensors: tuple[StoredTensor, ...]

    def to_bytes(self) -> bytes:
        """Return a serialised form for :meth:`from_bytes`."""
        files = [(part_name(rank), *each) for rank, each in enumerate(self.files)]
        told = {"version": VERSION, "steps": self.steps, "files": files}
        return encode({**told, "tree": self.tree, "tensors": _plain_tensors(self.tensors)})

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Parse the output of :meth:`to_bytes`."""
        told = _read(content)
        try:
            files = tuple(_file(rank, *each) for rank, each in enumerate(told["files"]))
            tensors = _tensors(told["tensors"])
            found = cls(steps=_whole(told["steps"]), files=files, tree=told["tree"], tensors=tensors)
            found.check()
        except ManifestError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"the manifest is not complete: {error}") from error
        return found

    def check(self) -> None:
        """Check that the pieces of each tensor cover it completely and are within the files."""
        if type(self.tree) is not dict:
            raise ManifestError(f"the manifest has no tree of states, but a {type(self.tree).__name__}")
        total = 0
        for tensor in self.tensors:
            _check_covered(tensor)
            for rank, piece in tensor.pieces:
                if rank >= len(self.files) or piece.offset + piece.nbytes > self.files[rank][1]:
                    raise ManifestError(f"tensor {shown(tensor.path)} lies beyond the end of the part of rank {rank}")
                total += piece.nbytes
        if total > sum(size for _, size in self.files):
            raise ManifestError(f"the manifest lists {total} bytes of tensors, more than its files have")
        if sorted(each.index for each in _indices(self.tree)) != list(range(len(self.tensors))):
            raise ManifestError("the manifest's tree has other tensors than its list")


def complete(parts: Sequence[Part]) -> Manifest:
    """Return the manifest for the parts from all ranks."""
    if [part.rank for part in parts] != list(range(len(parts))) or len({part.steps for part in parts}) != 1:
        steps = {part.rank: part.steps for part in parts}
        raise ManifestError(f"parts must be of ranks 0 to {len(parts) - 1} and of one step, but are of {steps}")
    tree = parts[0].tree
    merged: dict[Path, StoredTensor] = {}
    for part in parts:
        for tensor in part.tensors:
            known = merged.get(tensor.path)
            if known is None:
                if part.rank:
                    _insert(tree, tensor.path, TensorIndex(len(merged)))
                merged[tensor.path] = tensor
                continue
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise ManifestError(f"ranks have written tensor {shown(tensor.path)} in different shapes or types")
            merged[tensor.path] = dataclasses.replace(known, pieces=(*known.pieces, *tensor.pieces))
        for path, value in part.plain:
            _insert(tree, path, value)
    tensors = (
        dataclasses.replace(each, pieces=tuple(sorted(each.pieces, key=lambda piece: piece[1].start)))
        for each in merged.values()
    )
    files = tuple((part.sha256, part.size) for part in parts)
    found = Manifest(steps=parts[0].steps, files=files, tree=tree, tensors=tuple(tensors))
    found.check()
    return found


def shown(path: Path) -> str:
    """Return a path as readable text: its keys joined by dots."""
    return ".".join(str(key) for key in path)


def _insert(tree: Any, path: Path, value: Any) -> None:
    """Insert a value into rank 0's tree unless the tree already has a value at that path."""
    node = tree
    for key in path[:-1]:
        if type(node) is not dict:
            raise ManifestError(f"there is no place for {shown(path)} in the tree of the first rank")
        node = node.setdefault(key, {})
    if type(node) is not dict:
        raise ManifestError(f"there is no place for {shown(path)} in the tree of the first rank")
    node.setdefault(path[-1], value)


def _check_covered(tensor: StoredTensor) -> None:
    at, itemsize = 0, dtype_of(tensor.dtype).itemsize
    for _, piece in tensor.pieces:
        if piece.start != at or piece.nbytes != piece.length * itemsize:
            raise ManifestError(f"tensor {shown(tensor.path)} has a gap or an overlap at element {at}")
        at += piece.length
    if at != math.prod(tensor.shape) or not tensor.pieces:
        raise ManifestError(f"tensor {shown(tensor.path)} ends at element {at} of {math.prod(tensor.shape)}")


def _indices(tree: Any) -> Iterable[TensorIndex]:
    """Yield all tensor indices in a tree."""
    if isinstance(tree, TensorIndex):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _indices(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _indices(value)
    elif isinstance(tree, SparseIndex):
        yield from (tree.indices, tree.values)


def _plain_tensors(tensors: Iterable[StoredTensor]) -> list[Any]:
    return [
        (each.path, each.shape, each.dtype, [(rank, *dataclasses.astuple(piece)) for rank, piece in each.pieces])
        for each in tensors
    ]


def _tensors(told: Any) -> tuple[StoredTensor, ...]:
    """Build the stored tensors from the result of :func:`_plain_tensors`."""
    return tuple(
        StoredTensor(path=tuple(path), shape=_sizes(shape), dtype=str(dtype), pieces=tuple(map(_piece, pieces)))
        for path, shape, dtype, pieces in told
    )


def _piece(told: Any) -> tuple[int, StoredPiece]:
    """Build one piece and its rank from the result of :func:`_plain_tensors`."""
    rank, start, length, offset, nbytes, offsets, sizes, archive = told
    begin, size = archive
    piece = StoredPiece(
        start=_whole(start),
        length=_whole(length),
        offset=_whole(offset),
        nbytes=_whole(nbytes),
        offsets=_sizes(offsets),
        sizes=_sizes(sizes),
        archive=(_whole(begin), _whole(size)),
    )
    return _whole(rank), piece


def _file(rank: int, name: Any, sha256: Any, size: Any) -> tuple[str, int]:
    """Return a part's checksum and size. Raises ManifestError if the part's name does not match its rank."""
    found = _PART.fullmatch(name) if isinstance(name, str) else None
    if found is None or int(found[1]) != rank:
        raise ManifestError(
            f"the part of rank {rank} must be the file {part_name(rank)}, but the manifest has {name!r}"
        )
    return str(sha256), _whole(size)


def _read(content: bytes) -> dict[Any, Any]:
    """Decode the fields of an account or a manifest. Raises ManifestError if invalid or of a different version."""
    try:
        told = decode(content)
    except ValueError as error:
        raise ManifestError(str(error)) from error
    if type(told) is not dict or told.get("version") != VERSION:
        found = told.get("version") if type(told) is dict else type(told).__name__
        raise ManifestError(f"it is not a record of version {VERSION}, but of {found!r:.40}")
    return told


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"a number from 0 was expected, but it has {value!r:.40}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list) or len(value) > _MOST_DIMENSIONS:
        raise ValueError(f"a shape was expected, but it has {value!r:.40}")
    return tuple(_whole(each) for each in value)
