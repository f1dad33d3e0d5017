"""Tensors in a captured state when a rank holds or writes only some of their elements (torch)."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from elastic_ray.state.codec import DEEPEST, SparseIndex, TensorIndex, dtype_name, too_deep

Path = tuple[Any, ...]
"""Keys and positions that lead to a leaf of a tree."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Stand-in, in a tree of states, for the part of a tensor that this rank writes.

    Raises ValueError if a piece has a different dtype from the tensor or exceeds its bounds.
    """

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    # pieces of consecutive elements: the place of the first one in the flattened tensor, and the elements, in any
    # shape. They do not overlap, also not with those of other ranks.
    held: tuple[tuple[int, Tensor], ...] = ()

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        for start, tensor in self.held:
            if tensor.dtype != self.dtype or start < 0 or start + tensor.numel() > numel:
                raise ValueError(
                    f"held must lie within {numel} elements of {dtype_name(self.dtype)}, but got {tensor.numel()} of "
                    f"{dtype_name(tensor.dtype)} from element {start} on"
                )

    @classmethod
    def of(cls, tensor: Tensor) -> Pieces:
        """Return pieces that hold an entire tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, ((0, tensor.detach()),))


@runtime_checkable
class WrittenInParts(Protocol):
    """Model state that all ranks write together, with each rank writing its own part."""

    def capture_part(self, rank: int, world_size: int) -> Any:
        """Return the part that this rank writes, with `Pieces` for tensors that other ranks also write.

        Together, the pieces from all ranks form the complete state. All other values are taken from the first rank's
        tree or, if it lacks them, from the other ranks' trees.
        """


def shared_out(tree: Any, rank: int, world_size: int) -> Any:
    """Return the part of a tree, identical on all ranks, that one rank writes.

    Rows (elements along the first dimension) of each tensor are divided evenly. A tensor with fewer rows than ranks is
    written by a single rank; such tensors are assigned to the ranks in turn.

    Returns the tree with `Pieces` in place of tensors. On all ranks but the first, it contains nothing else.
    """
    count = 0

    def share(tensor: Tensor) -> Pieces:
        nonlocal count
        count += 1
        whole = tensor.detach()
        rows = whole.shape[0] if whole.dim() else 1
        if rows < world_size or not whole.dim():
            return Pieces.of(whole) if (count - 1) % world_size == rank else Pieces(tuple(whole.shape), whole.dtype)
        first, last = rows * rank // world_size, rows * (rank + 1) // world_size
        return Pieces(tuple(whole.shape), whole.dtype, ((first * (whole.numel() // rows), whole[first:last]),))

    def visit(node: Any) -> Any:
        if isinstance(node, Tensor):
            return share(node) if node.layout == torch.strided else node
        if isinstance(node, Mapping):
            return {key: visit(value) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(visit(value) for value in node)
        return node

    shared = visit(tree)
    return shared if rank == 0 else only_pieces(shared)


def only_pieces(tree: Any) -> Any:
    """Return a tree as nested dicts that keep only its non-empty `Pieces`.

    A list becomes a dict keyed by position.
    """
    if type(tree) in (list, tuple):
        tree = dict(enumerate(tree))
    if isinstance(tree, Mapping):
        found = {key: only_pieces(value) for key, value in tree.items()}
        return {key: value for key, value in found.items() if value is not None and value != {}}
    return tree if isinstance(tree, Pieces) and tree.held else None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NamedPieces:
    """`Pieces` with the path of their tensor in the tree that holds all states."""

    path: Path
    pieces: Pieces


def split_tree(tree: Any) -> tuple[Any, list[NamedPieces]]:
    """Split a tree into its tensors and a skeleton with indices in place of the tensors.

    Raises NotPlainError if the tree is nested too deeply or contains itself.
    """
    found: list[NamedPieces] = []

    def add(leaf: Any, path: Path) -> TensorIndex:
        found.append(NamedPieces(path, leaf if isinstance(leaf, Pieces) else Pieces.of(leaf)))
        return TensorIndex(len(found) - 1)

    return skeleton_of(tree, add, leaves=(Tensor, Pieces)), found


def skeleton_of(tree: Any, add: Callable[[Any, Path], TensorIndex], *, leaves: Any = Tensor) -> Any:
    """Return a tree with the result of ``add(leaf, path)`` in place of each of its leaves; other values stay.

    Raises NotPlainError if the tree is nested too deeply or contains itself.
    """

    def visit(node: Any, path: Path) -> Any:
        if len(path) > DEEPEST:
            raise too_deep("".join(f"[{key!r}]" for key in path))
        if isinstance(node, Tensor) and node.layout == torch.sparse_coo:
            whole = node.detach().coalesce()
            indices = add(whole.indices(), (*path, "indices"))
            return SparseIndex(indices, add(whole.values(), (*path, "values")), tuple(whole.shape))
        if isinstance(node, leaves):
            return add(node, path)
        if isinstance(node, Mapping):
            return alike(type(node), {key: visit(value, (*path, key)) for key, value in node.items()})
        if type(node) in (list, tuple):
            return type(node)(visit(value, (*path, index)) for index, value in enumerate(node))
        return node

    return visit(tree, ())


def alike(kind: type[Any], values: dict[Any, Any]) -> Any:
    """Return a mapping with these values: an OrderedDict or Counter if a scheduler may rely on that (milestones)."""
    return kind(values) if kind in (collections.OrderedDict, collections.Counter) else values
