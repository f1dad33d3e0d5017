"""Digests of the tensors that all ranks hold alike (torch)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_ray.communication.communicator import Communicator
from elastic_ray.state.layout import ReplicasDifferError

_ROW = 8  # integers that are added up before they are weighed by their place
_LARGE_BYTES = 1 << 16
_DIGEST_BYTES = 5


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a captured state with their paths."""
    if isinstance(tree, torch.Tensor):
        yield name, getattr(tree, "_local_tensor", tree)  # of what a unit has divided, this worker's part
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}/{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{name}/{index}")


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory, in the order of its elements, as integers; of one row."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values()
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    if flat.numel() and flat.numel() * size % 8 == 0:
        if flat.storage_offset() * size % 8:
            flat = flat.clone()  # a part of a larger tensor, which cannot be read as other integers where it lies
        return flat.view(torch.int64)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def _fold(values: torch.Tensor) -> torch.Tensor:
    """Fold a tensor into one integer that depends on order; it wraps around, alike on every device."""
    whole = values.numel() // _ROW * _ROW
    rows = values[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    rows = torch.cat([rows, values[whole:].to(torch.int64)])
    return (rows * (2 * torch.arange(rows.numel(), device=rows.device) + 1)).sum()


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """Return a number of 40 bits for the contents of tensors, in this order; 0 for none.

    Small ones are folded together: a model of many parameters costs few operations.
    """
    together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    folded: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.numel() * tensor.element_size() < _LARGE_BYTES:
            together.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().reshape(-1))
        else:
            folded.append(integers(tensor).sum(dtype=torch.int64))
    folded += [_fold(integers(torch.cat(small))) for small in together.values()]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in folded:
        by_device.setdefault(each.device, []).append(each)
    told = [torch.stack(each).tolist() for each in by_device.values()]
    if not folded:
        return 0
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=5).digest(), "big") or 1


def different_ranks(told: Sequence[int], joined: Sequence[bool]) -> tuple[int, ...]:
    """Return the ranks whose digest is not that of most of the members; joiners have no say in it.

    Args:
        joined: which ranks have joined with this group.
    """
    members = [each for each, late in zip(told, joined, strict=True) if not late] or list(told)
    common = max(set(members), key=lambda value: (members.count(value), -members.index(value)))
    return tuple(rank for rank, value in enumerate(told) if value != common)


def difference(communicator: Communicator, tensors: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> str:
    """Return what tensor is the first that differs, and how the ranks differ in it; all ranks call it.

    Args:
        tensors: as this rank holds them.
        ranks: those that differ from the others.

    Raises CommunicationFailedError: the group broke.
    """
    names = list(tensors)
    others = next(rank for rank in range(communicator.world_size) if rank not in ranks)
    plural, rest = "s" if len(ranks) > 1 else "", communicator.world_size - len(ranks)
    sides = f"rank{plural} {', '.join(map(str, ranks))} and the other {rest}"
    counts = [row[0] for row in communicator.gather_ints([len(names)])]
    if len(set(counts)) > 1:
        return f"{sides} hold different numbers of tensors ({counts[ranks[0]]} and {counts[others]})"
    sums = communicator.gather_ints([int(integers(each).sum(dtype=torch.int64)) for each in tensors.values()])
    first = next((n for n, name in enumerate(names) if sums[ranks[0]][n] != sums[others][n]), None)
    what = "values whose order differs" if first is None else f"different values in {names[first]}"
    return f"{sides} hold {what}"


def check_alike(ranks: Sequence[int], joined: Sequence[bool], told: str, step: int) -> None:
    """Raise what a difference of members means.

    Raises ReplicasDifferError: members, which have trained so far, differ among themselves.
    """
    if any(not joined[rank] for rank in ranks):
        raise ReplicasDifferError(
            f"the ranks must hold the same before a group begins, but after {step} steps {told}. What changes "
            "parameters or an optimizer's state must do so alike on every rank"
        )
