"""The ``.metadata`` by which torch's own readers find their way in a sharded checkpoint (torch).

It is a pickle, as torch has it. We write it for others, and never read it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from elastic_ray.checkpoints.sharded.manifest import Manifest, Path, StoredTensor, part_name, shown
from elastic_ray.state.codec import dtype_of

Values = Iterable[tuple[Path, tuple[int, int]]]


def torch_metadata(manifest: Manifest, values: Values) -> bytes:
    """The file's content.

    A tensor's name is its path with dots, as torch names the leaves of nested dicts: ``model/0.layer.weight``.

    Args:
        manifest: of the checkpoint.
        values: paths of plain values, and where torch's archive of each is in the first rank's part.
    """
    entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for tensor in manifest.tensors:
        name = _new_name(tensor.path, entries)
        entries[name] = _described(tensor)
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


def _described(tensor: StoredTensor) -> dcp.TensorStorageMetadata:
    """A tensor in torch's words."""
    return dcp.TensorStorageMetadata(
        properties=dcp.TensorProperties(dtype=dtype_of(tensor.dtype)),
        size=torch.Size(tensor.shape),
        chunks=[
            dcp.ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
            for _, piece in tensor.pieces
        ],
    )


def _new_name(path: Path, taken: Iterable[str]) -> str:
    """A name that no other path has, though keys may have dots."""
    name, number = shown(path), 1
    while name in taken:
        number += 1
        name = f"{shown(path)}#{number}"
    return name


def _torch_path(path: Path) -> tuple[str | int, ...]:
    """Keys as text: torch takes numbers for positions in lists."""
    return tuple(str(key) for key in path)
