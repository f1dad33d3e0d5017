"""Tensors of a checkpoint that a rank reads only in part, once it knows which elements it needs (torch)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from elastic_ray.state.pieces import Path

_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnreadTensor:
    """Stand-in, in a state from a checkpoint, for a tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # reads the elements between two places of the flattened tensor, the second one left out, into memory of their own
    # on the CPU
    elements: Callable[[int, int], Tensor]
    device: torch.device = _CPU  # where :meth:`rows`, :meth:`part` and :meth:`whole` put them
    rows_dtype: torch.dtype | None = None  # as what, None for as they are

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> UnreadTensor:
        """Return the stand-in with a different device and dtype for the elements to be read."""
        return dataclasses.replace(self, device=device, rows_dtype=dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        """Read rows ``start`` to ``stop`` - 1, [stop - start, ...]; raises the same errors as :meth:`read`."""
        width = math.prod(self.shape[1:])
        return self.part(start * width, stop * width).view(stop - start, *self.shape[1:])

    def part(self, start: int, stop: int) -> Tensor:
        """Read elements ``start`` to ``stop`` - 1 of the flattened tensor; raises the same errors as :meth:`read`."""
        return self.elements(start, stop).to(self.device, self.rows_dtype)

    def whole(self) -> Tensor:
        """Read the whole tensor onto its device, in its shape; raises the same errors as :meth:`read`."""
        return self.part(0, math.prod(self.shape)).view(self.shape)

    def read(self) -> Tensor:
        """Read the whole tensor on the CPU.

        Raises CorruptStateError if the tensor has changed since the checkpoint was opened, or cannot be read.
        """
        return self.elements(0, math.prod(self.shape)).view(self.shape)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> UnreadTensor:
        """Return the same object, because stored data does not change."""
        return self


def read_all(tree: Any) -> Any:
    """Return a tree with all unread tensors read, each to its device; the same object if it has none."""
    if isinstance(tree, UnreadTensor):
        return tree.whole()
    if isinstance(tree, Mapping):
        found = {key: read_all(value) for key, value in tree.items()}
        return found if any(found[key] is not value for key, value in tree.items()) else tree
    if type(tree) in (list, tuple):
        items = [read_all(value) for value in tree]
        return type(tree)(items) if any(a is not b for a, b in zip(items, tree, strict=True)) else tree
    return tree


def is_divided(tree: Mapping[str, Any], path: Path) -> bool:
    """True if ranks that continue from a captured tree may each hold a part of the tensor at `path`.

    That applies to tensors of a sharded model, or of an optimizer whose state was divided into tiles.
    """
    match path:
        case (_, "parameters", _):
            return True
        case (name, "state", _, _):
            return isinstance(state := tree.get(name), Mapping) and isinstance(state.get("divided"), Mapping)
    return False
