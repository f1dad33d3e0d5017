"""SHELL: completes a sharded checkpoint by writing its manifest once all parts exist (torch)."""

from __future__ import annotations

import pickle
import posixpath
import time
from collections.abc import Callable, Iterable, Sequence

import pyarrow.fs
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from elastic_ray.checkpoints.automatic import StateFile, write_note
from elastic_ray.checkpoints.checked_files import write_checked
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.manifest import (
    MANIFEST,
    TORCH_METADATA,
    Manifest,
    ManifestError,
    Part,
    Path,
    account_name,
    complete,
    part_name,
    shown,
)
from elastic_ray.state.codec import dtype_of
from elastic_ray.state.resume_point import ResumePoint

_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 0.5
_LARGEST_ACCOUNT_BYTES = 1 << 28
Values = Iterable[tuple[Path, tuple[int, int]]]


class PartsMissingError(Exception):
    """Error raised if some ranks have not written their parts of a checkpoint."""

    def __init__(self, text: str, *, unseen: bool) -> None:
        super().__init__(text)
        self.unseen = unseen


def await_parts(
    storage: RunStorage,
    directory: str,
    own: Part,
    ranks: int,
    *,
    timeout_s: float,
    go_on: Callable[[], bool],
    all_live: Callable[[], bool] = lambda: True,
) -> tuple[Part, ...]:
    """Wait until all ranks have written their parts of a checkpoint, and return the parts in rank order.

    Args:
        timeout_s: maximum time without any change in the checkpoint's ``directory`` [s].
        go_on: polled while waiting; if it returns False, waiting stops with ``InterruptedError``.
        all_live: returns True if all workers that should write a part are still in the group.
    """
    found: dict[int, Part] = {0: own}
    sizes: dict[str, int] = {}
    heard_s, poll_s = time.monotonic(), _FIRST_POLL_S
    while True:
        live = all_live()  # asked first: a part that was written before its worker left counts
        seen = _sizes(storage, directory)
        for rank in range(1, ranks):
            if rank not in found and account_name(rank) in seen:
                part = _account(storage, directory, rank, own.steps)
                found |= {rank: part} if part is not None else {}
        if len(found) == ranks:
            return tuple(found[rank] for rank in range(ranks))
        missing = [rank for rank in range(ranks) if rank not in found]
        if not go_on():
            raise InterruptedError("the checkpoint was abandoned")
        if not live:
            raise PartsMissingError(f"a worker has left the group whose part is not written: {missing}", unseen=False)
        now_s = time.monotonic()
        if seen != sizes:
            sizes, heard_s, poll_s = seen, now_s, _FIRST_POLL_S
        elif now_s - heard_s >= timeout_s:
            names = ", ".join(map(str, missing))
            unseen = not any(part_name(rank) in seen for rank in missing)
            raise PartsMissingError(f"there is no part of ranks {names} after {timeout_s:g} s", unseen=unseen)
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def finish(
    storage: RunStorage,
    directory: str,
    parts: Sequence[Part],
    resume_point: ResumePoint,
    go_on: Callable[[], bool] = lambda: True,
) -> StateFile:
    """Write torch's metadata, the manifest and finally the note, which makes the checkpoint complete."""
    manifest = complete(parts)
    metadata, content = torch_metadata(manifest, parts[0].values), manifest.to_bytes()
    path = posixpath.join(directory, TORCH_METADATA)
    write_checked(storage, path, lambda stream: stream.write(metadata), go_on)
    path = posixpath.join(directory, MANIFEST)
    written = write_checked(storage, path, lambda stream: stream.write(content), go_on)
    size = sum(part.size for part in parts)
    state = StateFile(path=directory, resume_point=resume_point, sha256=written.sha256, size=size, parts=len(parts))
    if not go_on():
        raise InterruptedError("the checkpoint was abandoned")
    write_note(storage, state)
    return state


def _sizes(storage: RunStorage, directory: str) -> dict[str, int]:
    entries = storage.filesystem.get_file_info(pyarrow.fs.FileSelector(directory, allow_not_found=True))
    return {posixpath.basename(each.path): int(each.size or 0) for each in entries if each.is_file}


def _account(storage: RunStorage, directory: str, rank: int, steps: int) -> Part | None:
    """Read a rank's account of its part and compare it with the part; None while the account is being written."""
    name = account_name(rank)
    size = storage.filesystem.get_file_info(posixpath.join(directory, name)).size or 0
    if size > _LARGEST_ACCOUNT_BYTES:
        raise ManifestError(f"{name} has {size} bytes, more than {_LARGEST_ACCOUNT_BYTES}")
    with storage.filesystem.open_input_stream(posixpath.join(directory, name)) as raw:
        part = Part.from_bytes(raw.readall())
    if part is None:
        return None
    there = storage.filesystem.get_file_info(posixpath.join(directory, part_name(rank))).size
    if (part.rank, part.steps, part.size) != (rank, steps, there):
        raise ManifestError(
            f"{name} names rank {part.rank}, step {part.steps} and {part.size} bytes, but {part_name(rank)} is to "
            f"be of rank {rank} and step {steps}, and has {there} bytes"
        )
    return part


# It is a pickle, as torch has it. We write it for others, and never read it.
def torch_metadata(manifest: Manifest, values: Values) -> bytes:
    """Return the content of the metadata file that ``torch.distributed.checkpoint`` needs to read the checkpoint.

    A tensor's name is its path joined by dots, as torch names the leaves of nested dicts: ``model/0.layer.weight``.
    """
    entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for tensor in manifest.tensors:
        name = _new_name(tensor.path, entries)
        entries[name] = dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(dtype=dtype_of(tensor.dtype)),
            size=torch.Size(tensor.shape),
            chunks=[
                dcp.ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
                for _, piece in tensor.pieces
            ],
        )
        paths[name] = _torch_path(tensor.path)
        for rank, piece in tensor.pieces:
            index = dcp.MetadataIndex(name, torch.Size(piece.offsets))
            places[index] = _StorageInfo(part_name(rank), *piece.archive)
    for path, archive in values:
        name = _new_name(path, entries)
        entries[name], paths[name] = dcp.BytesStorageMetadata(), _torch_path(path)
        places[dcp.MetadataIndex(name)] = _StorageInfo(part_name(0), *archive)
    return pickle.dumps(
        dcp.Metadata(
            state_dict_metadata=entries, planner_data=paths, storage_data=places, storage_meta=dcp.StorageMeta()
        )
    )


def _new_name(path: Path, taken: Iterable[str]) -> str:
    """Return an unused name for a path; two paths may have the same text, because keys may contain dots."""
    name, number = shown(path), 1
    while name in taken:
        number += 1
        name = f"{shown(path)}#{number}"
    return name


def _torch_path(path: Path) -> tuple[str | int, ...]:
    """Return a path with all keys as text, because torch treats integers as list positions."""
    return tuple(str(key) for key in path)
