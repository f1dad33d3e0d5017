"""Linear algebra whose bits are the same on every machine (torch).

Each rank computes for itself from what all ranks hold, and replicas must not differ. What LAPACK and BLAS return
depends on the number of threads and on the CPU, and so does any sum in one call. Here are only operations of which
IEEE 754 defines each element (products, sums, differences, quotients and roots), one a call, so that none is fused with
another.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Less of a column than this share, behind the columns before it, is their rounding errors.
_SMALLEST = 1e-9
_AT_ONCE = 1 << 16  # elements, which with what is made of them stay in a core's cache


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns that span those of [rows, columns], in float64, by the modified Gram-Schmidt process.

    A column that depends on those before it becomes zero. What is not finite stays so.
    """
    left = matrix.double().t().contiguous()  # columns as rows
    before = _sums(left * left).sqrt_()
    for index in range(left.shape[0]):
        column, rest = left[index], left[index + 1 :]
        products = _sums(left[index:] * column)
        norm = products[0].sqrt()
        depends = (norm < _SMALLEST * before[index]) | (before[index] == 0)
        column.copy_(torch.where(depends, 0.0, column / norm))
        if rest.shape[0]:
            rest.sub_(torch.where(depends, 0.0, products[1:] / norm) * column)
    return left.t()


def product_of(left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """[rows, rank] times [rank, columns] of a small rank, some rows after the other.

    Yields:
        Which rows, and the product's, in memory that the next ones are written to: on CPUs it stays in the cache.
    """
    rows, columns = left.shape[0], right.shape[1]
    several = rows if left.is_cuda else min(rows, max(1, _AT_ONCE // max(1, columns)))
    product, term = left.new_empty(several, columns), left.new_empty(several, columns)
    for first in range(0, rows, several):
        factors = left[first : first + several]
        place, added = product[: factors.shape[0]], term[: factors.shape[0]]
        torch.mul(factors[:, :1], right[:1], out=place)
        for index in range(1, right.shape[0]):
            torch.mul(factors[:, index : index + 1], right[index : index + 1], out=added)
            place.add_(added)
        yield slice(first, first + several), place


def _sums(vectors: torch.Tensor) -> torch.Tensor:
    """Of each row, [..., 1]: the second half is added to the first until one element is left. Overwrites them."""
    size = vectors.shape[-1]
    while size > 1:
        half = size // 2
        vectors[..., :half].add_(vectors[..., size - half : size])
        size -= half
    return vectors[..., :1].clone()
