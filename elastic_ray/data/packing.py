"""Documents packed into rows of equal length; the packing depends only on lengths, seed and epoch (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from elastic_ray.data.sharding import Permutation

Piece = tuple[int, int, int]
"""A document, and the first of its tokens and the one after the last, in a row."""


def plan_rows(lengths: Sequence[int], row: int, *, seed: int, epoch: int) -> list[list[Piece]]:
    """Return, for each packed row, the pieces of documents (document, start, end) that it holds.

    Every token is used once. Documents are processed in random order. Each is cut into pieces of ``row`` tokens and a
    remainder, and each piece is put into the first of the most recent rows that has room for it.

    >>> plan_rows([3, 5, 2], 4, seed=0, epoch=0)
    [[(1, 0, 4)], [(1, 4, 5), (2, 0, 2)], [(0, 0, 3)]]
    """
    rows: list[list[Piece]] = []
    room: list[int] = []
    for document in Permutation(samples=len(lengths), key=f"packing {seed} {epoch}")[:].tolist():
        for start in range(0, lengths[document], row):
            piece = document, start, min(start + row, lengths[document])
            size = piece[2] - start
            first = max(0, len(rows) - _OPEN)
            place = next((at for at in range(first, len(rows)) if room[at] >= size), None)
            if place is None:
                place = len(rows)
                rows.append([])
                room.append(row)
            rows[place].append(piece)
            room[place] -= size
    return rows


_OPEN = 64  # latest rows that may still be filled


def _unfit(document: int, found: str) -> TypeError:
    return TypeError(
        "PackedDataset(documents) must hold tensors, arrays or lists of integers, one number a token, but document "
        f"{document} is {found}"
    )


def _length(number: int, document: Any) -> int:
    one_row = isinstance(document, Sized) and getattr(document, "ndim", 1) == 1
    if not one_row or isinstance(document, str | bytes | Mapping):
        raise _unfit(number, repr(document)[:60])
    return len(document)


class PackedDataset(Dataset[tuple[Tensor, Tensor]]):
    """Rows of ``length`` tokens that hold several documents each; an epoch's rows hold every token once.

    A sample is ``(tokens, documents)``, each of ``length`` elements. ``documents`` is 1, 2, ... for the first, second,
    ... document in the row and 0 for padding; use it for an attention mask and for ``loader.weigh``. The loader
    distributes rows as samples, so each document is used once per epoch, however the group changes.

    Args:
        documents: tokens of each document, as tensors, arrays or lists of integers.
        length: tokens per row.
        seed: seed for the packing.
        padding: token that fills the rest of a row.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Examples:
        >>> packed = PackedDataset([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]], length=4)
        >>> [row.tolist() for row in packed[1]]
        [[8, 9, 10, 0], [1, 2, 2, 0]]
    """

    def __init__(self, documents: Sequence[Any], length: int, *, seed: int = 0, padding: int = 0) -> None:
        for name, value in (("length", length), ("seed", seed), ("padding", padding)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"PackedDataset({name}) must be a whole number, but got {value!r}")
        if length < 1:
            raise ValueError(f"PackedDataset(length) must be 1 token or more, but got {length}")
        self._documents, self._length, self._padding, self._seed = documents, length, padding, seed
        if not isinstance(documents, Sized) or not hasattr(documents, "__getitem__") or isinstance(documents, Mapping):
            raise TypeError(f"PackedDataset(documents) must be a list or another sequence, but got {documents!r}")
        self._lengths = [_length(document, documents[document]) for document in range(len(documents))]
        if not any(self._lengths):
            raise ValueError(f"PackedDataset(documents) must hold a token, but got {len(documents)} empty documents")
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Repack the documents for `epoch`; every worker must call this with the same number."""
        self.rows = plan_rows(self._lengths, self._length, seed=self._seed, epoch=epoch)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        tokens = torch.full((self._length,), self._padding, dtype=torch.long)
        documents = torch.zeros(self._length, dtype=torch.long)
        at = 0
        for place, (document, start, stop) in enumerate(self.rows[row], 1):
            until = at + stop - start
            piece = torch.as_tensor(self._documents[document][start:stop])
            if piece.is_floating_point() or piece.shape != (stop - start,):
                raise _unfit(document, f"{piece.dtype} of shape {tuple(piece.shape)}")
            tokens[at:until] = piece
            documents[at:until] = place
            at = until
        return tokens, documents
