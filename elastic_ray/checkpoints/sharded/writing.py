"""SHELL: one rank's part of a sharded checkpoint, in the archives of torch's distributed checkpoints (torch)."""

from __future__ import annotations

import contextlib
import io
import posixpath
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_ray.checkpoints.checked_files import CheckedStream, write_checked
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.manifest import (
    Part,
    Path,
    StoredPiece,
    StoredTensor,
    account_name,
    part_name,
)
from elastic_ray.checkpoints.sharded.rectangles import rectangles
from elastic_ray.state.codec import SparseIndex, TensorIndex, dtype_name, encode
from elastic_ray.state.pieces import NamedPieces
from placement.storage.private_files import make_directory

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a file in a zip archive: lengths of its name and of what follows that


def write_part(
    storage: RunStorage,
    directory: str,
    *,
    rank: int,
    steps: int,
    skeleton: Any,
    tensors: Sequence[NamedPieces],
    go_on: Callable[[], bool] = lambda: True,
) -> Part:
    """Write a rank's part, and then its account of it.

    Args:
        storage: the run.
        directory: of the checkpoint.
        rank: that writes.
        steps: optimizer steps that the state holds.
        skeleton: of the tree that this rank has captured.
        tensors: those that the skeleton has indices for, in CPU memory; they do not change meanwhile.
        go_on: asked with every piece; once it says no, writing ends with ``InterruptedError``.

    Raises:
        NotPlainError: the tree holds something else than tensors and plain values.
    """
    make_directory(storage.filesystem, posixpath.dirname(directory), private=storage.private)
    make_directory(storage.filesystem, directory, private=storage.private)
    encode(skeleton)  # what cannot be told is found before anything is written
    stored: list[StoredTensor] = []
    values: list[tuple[Path, tuple[int, int]]] = []
    path = posixpath.join(directory, part_name(rank))

    def write(stream: CheckedStream) -> None:
        stored.extend(_write_tensor(stream, rank, each) for each in tensors)
        if rank == 0:  # for torch's own readers; ours has the skeleton
            values.extend((path, _archived(stream, value)[0]) for path, value in plain_values(skeleton))

    try:
        written = write_checked(storage, path, write, go_on)
        part = Part(
            rank=rank,
            steps=steps,
            sha256=written.sha256,
            size=written.size,
            tensors=tuple(stored),
            plain=tuple(plain_values(skeleton)) if rank else (),
            tree=None if rank else skeleton,
            values=tuple(values),
        )
        if rank:
            content = part.to_bytes()
            account = posixpath.join(directory, account_name(rank))
            write_checked(storage, account, lambda stream: stream.write(content), go_on)
    except BaseException:
        with contextlib.suppress(Exception):
            storage.filesystem.delete_file(path)
        raise
    return part


def plain_values(skeleton: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a skeleton that are no tensors, with their paths; a list without tensors is one."""
    if isinstance(skeleton, Mapping):
        for key, value in skeleton.items():
            yield from plain_values(value, (*path, key))
    elif type(skeleton) in (list, tuple) and _has_tensors(skeleton):
        for index, value in enumerate(skeleton):
            yield from plain_values(value, (*path, index))
    elif not isinstance(skeleton, (TensorIndex, SparseIndex)):
        yield path, skeleton


def _has_tensors(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(map(_has_tensors, node.values()))
    if type(node) in (list, tuple):
        return any(map(_has_tensors, node))
    return isinstance(node, (TensorIndex, SparseIndex))


def _write_tensor(stream: CheckedStream, rank: int, named: NamedPieces) -> StoredTensor:
    """Write what this rank has of a tensor, as rectangles."""
    pieces = named.pieces
    stored = []
    for start, tensor in sorted(pieces.held, key=lambda held: held[0]):
        flat = tensor.reshape(-1)
        for part in rectangles(pieces.shape, start, flat.numel()):
            elements = flat[part.start - start : part.start - start + part.length]
            archive, offset = _archived(stream, elements.view(part.sizes))
            stored.append(
                StoredPiece(
                    start=part.start,
                    length=part.length,
                    offset=offset,
                    nbytes=elements.nbytes,
                    offsets=part.offsets,
                    sizes=part.sizes,
                    archive=archive,
                )
            )
    return StoredTensor(
        path=named.path,
        shape=pieces.shape,
        dtype=dtype_name(pieces.dtype),
        pieces=tuple((rank, piece) for piece in stored),
    )


def _archived(stream: CheckedStream, value: Any) -> tuple[tuple[int, int], int]:
    """Write torch's archive of a value; returns where it is, and where a tensor's bytes begin."""
    archive, begin = io.BytesIO(), stream.size
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        value = value.clone()  # a view would bring all of its storage along
    torch.save(value, archive)
    offset = begin
    if isinstance(value, Tensor):
        with zipfile.ZipFile(archive) as files:
            (entry,) = [each for each in files.infolist() if each.filename.endswith("/data/0")]
        header = archive.getbuffer()[entry.header_offset : entry.header_offset + _LOCAL_HEADER.size]
        offset = begin + entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        del header
    stream.write(archive.getbuffer())
    return (begin, stream.size - begin), offset
