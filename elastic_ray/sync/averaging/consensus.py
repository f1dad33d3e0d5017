"""Mean of the ranks' parameters and optimizer moments, bitwise identical on all ranks (torch).

Replicas that train separately may hold different tensors. For example, a layer has no moments on a rank if none of the
rank's samples have used it. Ranks therefore exchange digests first, and full descriptions only if the digests differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_ray.communication.communicator import Communicator
from elastic_ray.state.codec import decode, dtype_name, dtype_of, encode
from elastic_ray.state.layout import digest
from elastic_ray.state.tree import pack, unpack


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Structure and tensor specifications of one key's entry, without the tensors' values."""

    skeleton: Any  # the tree, with an index for each tensor
    # shape, name of the type, and whether it is on a GPU, of each tensor
    specs: tuple[tuple[tuple[int, ...], str, bool], ...]


_Parts = Mapping[str, _Part]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Structure of one key's entry in the agreed state, and the ranks that hold it."""

    part: _Part  # as the first rank holds it that does
    holders: tuple[int, ...]  # the ranks that hold the same tensors


def agree(
    communicator: Communicator, trees: Mapping[str, Any], *, holds: bool, counts: bool, changed: bool
) -> dict[str, Any] | None:
    """Return the mean of the contributing ranks' trees; called on every rank.

    Each floating-point tensor is averaged in float32 or wider, over the ranks that hold it; other values are copied
    from the first of these ranks. The result is in new memory and bitwise identical on all ranks.

    Args:
        trees: This rank's trees of tensors and plain values, keyed by name.
        holds: Whether this rank receives the mean.
        counts: Whether this rank contributes to the mean; at least one rank must.
        changed: Whether this rank's trees may differ from other ranks' trees.

    Returns the mean, keyed by name; None if this rank does not receive the mean, or if ``changed`` is False on every
    rank that does.

    Raises CommunicationFailedError if the group breaks.
    """
    mine, tensors = _parts(trees)
    text = _text(mine)
    rows = communicator.gather_ints([int(counts), int(holds and changed), digest(text)], with_gradients=True)
    if not any(row[1] for row in rows):
        return None
    counting = [rank for rank, row in enumerate(rows) if row[0]]
    found = _sums(communicator, _kept(communicator, mine, text, counting, [row[2] for row in rows]), tensors)
    return found if holds else None


def mean(communicator: Communicator, trees: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean of all ranks' trees, like :func:`agree`; all ranks must have the same :func:`layout`.

    Raises CommunicationFailedError if the group breaks.
    """
    mine, tensors = _parts(trees)
    everyone = tuple(range(communicator.world_size))
    return _sums(communicator, {key: _Kept(part=part, holders=everyone) for key, part in mine.items()}, tensors)


def layout(trees: Mapping[str, Any]) -> int:
    """Return a digest of the trees' structure and of their tensors' shapes and types."""
    return digest(_text(_parts(trees)[0]))


def _parts(trees: Mapping[str, Any]) -> tuple[dict[str, _Part], dict[str, list[torch.Tensor]]]:
    tensors: dict[str, list[torch.Tensor]] = {}
    parts: dict[str, _Part] = {}
    for key, tree in trees.items():
        skeleton, tensors[key] = pack(tree)
        specs = tuple((tuple(t.shape), dtype_name(t.dtype), t.is_cuda) for t in tensors[key])
        parts[key] = _Part(skeleton=skeleton, specs=specs)
    return parts, tensors


def _text(parts: _Parts) -> bytes:
    return encode([(key, part.skeleton, part.specs) for key, part in parts.items()])


def _kept(
    communicator: Communicator, mine: _Parts, text: bytes, counting: Sequence[int], digests: Sequence[int]
) -> dict[str, _Kept]:
    """Agree on the structure of each key's entry and on the ranks that hold it; the same on all ranks."""
    if len({digests[rank] for rank in counting}) == 1:
        if len(set(digests)) > 1:  # a rank that does not count, as one that has just come, may hold other things
            mine = _read(communicator.broadcast_bytes(text, counting[0], with_gradients=True))
        return {key: _Kept(part=part, holders=tuple(counting)) for key, part in mine.items()}
    everyone = {rank: _read(communicator.broadcast_bytes(text, rank, with_gradients=True)) for rank in counting}
    kept: dict[str, _Kept] = {}
    for held in everyone.values():
        for key, part in held.items():
            if key not in kept:
                holders = [rank for rank, other in everyone.items() if key in other and other[key].specs == part.specs]
                kept[key] = _Kept(part=part, holders=tuple(holders))
    return kept


def _read(text: bytes) -> dict[str, _Part]:
    return {key: _Part(skeleton=skeleton, specs=specs) for key, skeleton, specs in decode(text)}


@torch.no_grad()
def _sums(
    communicator: Communicator, kept: Mapping[str, _Kept], tensors: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, Any]:
    """Sum all tensors, using one flat buffer per dtype and device, and return the means."""
    rank = communicator.rank
    slots = [(key, index, spec) for key, each in kept.items() for index, spec in enumerate(each.part.specs)]
    kinds: dict[tuple[torch.dtype, bool], list[tuple[str, int, Any]]] = {}
    for slot in slots:
        kinds.setdefault((_summed_as(dtype_of(slot[2][1])), slot[2][2]), []).append(slot)
    found: dict[str, list[Any]] = {key: [None] * len(each.part.specs) for key, each in kept.items()}
    works = []
    for (dtype, cuda), members in kinds.items():
        sizes = [torch.Size(spec[0]).numel() for _, _, spec in members]
        flat = torch.zeros(sum(sizes), dtype=dtype, device="cuda" if cuda else "cpu")
        for (key, index, spec), piece in zip(members, torch.split(flat, sizes), strict=True):
            holders = kept[key].holders
            if rank in (holders if dtype.is_floating_point or dtype.is_complex else holders[:1]):
                piece.copy_(tensors[key][index].reshape(-1))
            found[key][index] = (piece, spec, len(holders))
        works.append((communicator.gradients.all_reduce(flat), flat))
    for work, _ in works:
        communicator.wait(work)
    return {key: unpack(each.part.skeleton, [_mean(*slot) for slot in found[key]]) for key, each in kept.items()}


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.promote_types(dtype, torch.float32)
    return torch.int64


def _mean(total: torch.Tensor, spec: tuple[tuple[int, ...], str, bool], holders: int) -> torch.Tensor:
    """Return the mean over the holders as a new tensor, so that the large flat buffer can be freed."""
    shape, name, _ = spec
    dtype = dtype_of(name)
    if dtype.is_floating_point or dtype.is_complex:
        total = total / holders
    return total.to(dtype, copy=True).view(shape)
