"""Low-rank compression of a bucket's matrices as two factors: PowerSGD (Vogels et al., NeurIPS 2019; torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.sync.device_numbers import real_count
from elastic_ray.sync.operations.owing import Compression

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup


# Less of a column than this share, after the columns before it, is their rounding errors.
_SMALLEST = 1e-9
_AT_ONCE = 1 << 16  # elements, which with what is made of them stay in a core's cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """Parameter sent as two factors."""

    place: int
    first: int
    rows: int
    columns: int
    rank: int

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the view of `vector` that holds this matrix."""
        return vector[self.first : self.first + self.rows * self.columns].view(self.rows, self.columns)


class LowRankCompression(Compression):
    """All-reduce of matrices in low-rank factors (PowerSGD); implements ``Compression``.

    The matrix M = sum_r M_r is approximated by one step of subspace iteration, starting from the previous step's factor
    Q. Q is the same on all ranks: P = orthonormal basis of sum_r M_r Q; Q' = sum_r M_r^T P; M ~ P Q'^T. Rank r's
    residual is M_r - P Q'^T / W, so that the residuals on W ranks sum to the error in M. One-dimensional tensors, and
    matrices whose factors would have more than half as many elements, are sent uncompressed with P. Rows of Q^T that
    become zero keep their old values, because the iteration cannot recover from zero.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._matrices: list[_Matrix] = []
        self._whole: list[slice] = []
        self._factors: list[torch.Tensor] = []  # Q^T of each matrix
        self._fresh: list[torch.Tensor] = []  # of the pass in progress
        self._given: dict[int, torch.Tensor] = {}  # before the first pass
        self._laid_out = 0
        self._first = self._second = torch.empty(0, dtype=torch.float32)

    def launch(self, params: Sequence[torch.Tensor], vector: torch.Tensor, group: GradientGroup) -> Sequence[Any]:
        """Launch the all-reduce of P for all matrices, together with the tensors that are not compressed."""
        if self._laid_out != vector.numel():
            self._lay_out(params, vector)
        factors = self._fresh or self._factors
        self._first = vector.new_empty(
            sum(m.rows * m.rank for m in self._matrices) + sum(each.stop - each.start for each in self._whole)
        )
        for matrix, factor, basis in zip(self._matrices, factors, self._bases(), strict=True):
            torch.mm(matrix.of(vector), factor.t(), out=basis)
        self._copy_whole(vector, back=False)
        return (group.all_reduce(self._first),)

    def next_round(
        self, vector: torch.Tensor, left_out: torch.Tensor, group: GradientGroup, finished: int
    ) -> Sequence[Any]:
        """After round 1, launch the all-reduce of Q for all matrices; after round 2, write the result to ``vector``."""
        if finished == 1 and self._matrices:
            self._second = vector.new_empty(sum(m.rank * m.columns for m in self._matrices))
            self._fresh = self._cut_second()
            for matrix, basis, factor in zip(self._matrices, self._bases(), self._fresh, strict=True):
                basis.copy_(orthonormal(basis))
                # M^T P as (P^T M)^T: on CPUs the former takes 12 times as long.
                torch.mm(basis.t(), matrix.of(vector), out=factor)
            return (group.all_reduce(self._second),)
        old = self._factors
        for number, (matrix, basis, factor) in enumerate(zip(self._matrices, self._bases(), self._fresh, strict=True)):
            mine, rest = matrix.of(vector), matrix.of(left_out)
            for rows, product in product_of(basis, factor):
                torch.sub(mine[rows], product, alpha=1.0 / group.world_size, out=rest[rows])
                mine[rows].copy_(product)
            self._fresh[number] = torch.where((factor != 0).any(1, keepdim=True), factor, old[number])
        self._copy_whole(vector, back=True)
        for each in self._whole:
            left_out[each].zero_()
        return ()

    def commit(self) -> None:
        """Keep the last pass's factors as the starting point for the next pass."""
        if self._fresh:
            self._factors, self._fresh = self._fresh, []

    def void(self) -> None:
        """Discard the last pass's factors."""
        self._fresh = []

    def factors(self) -> dict[int, torch.Tensor]:
        if not self._laid_out:
            return dict(self._given)
        return {matrix.place: factor for matrix, factor in zip(self._matrices, self._factors, strict=True)}

    def set_factors(self, factors: dict[int, torch.Tensor]) -> None:
        self._given = factors
        self._laid_out = 0

    def _lay_out(self, params: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
        """Determine which parameters to compress, and initialise their factors identically on all ranks."""
        self._matrices, self._whole, self._factors, self._fresh = [], [], [], []
        first = 0
        for place, param in enumerate(params):
            numel, rows = real_count(param), param.shape[0] if param.dim() > 1 else 1
            columns = numel // max(1, rows)
            rank = min(self._rank, rows, columns)
            if param.dim() > 1 and 2 * rank * (rows + columns) <= numel:
                self._matrices.append(_Matrix(place=place, first=first, rows=rows, columns=columns, rank=rank))
                self._factors.append(self._beginning(place, rank, columns, vector))
            else:
                self._whole.append(slice(first, first + numel))
            first += numel
        self._laid_out = vector.numel()

    def _beginning(self, place: int, rank: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """Return the factor given for this matrix, or a random factor seeded by the matrix's position."""
        given = self._given.get(place)
        if given is not None and given.shape == (rank, columns):
            return given.to(like)
        generator = torch.Generator().manual_seed(place)
        return torch.randn(rank, columns, generator=generator, dtype=torch.float32).to(like)

    def _bases(self) -> list[torch.Tensor]:
        """Return P for each matrix, as views of the first round's buffer."""
        sizes = [m.rows * m.rank for m in self._matrices]
        pieces = torch.split(self._first[: sum(sizes)], sizes)
        return [piece.view(m.rows, m.rank) for m, piece in zip(self._matrices, pieces, strict=bool(sizes))]

    def _cut_second(self) -> list[torch.Tensor]:
        pieces = torch.split(self._second, [m.rank * m.columns for m in self._matrices])
        return [piece.view(m.rank, m.columns) for m, piece in zip(self._matrices, pieces, strict=True)]

    def _copy_whole(self, vector: torch.Tensor, *, back: bool) -> None:
        """Copy the uncompressed tensors into the first round's buffer, or back from it."""
        position = sum(m.rows * m.rank for m in self._matrices)
        for each in self._whole:
            mine, place = vector[each], self._first[position : position + each.stop - each.start]
            (mine if back else place).copy_(place if back else mine)
            position += each.stop - each.start


# Each rank computes for itself from what all ranks hold, and replicas must not differ. What LAPACK and BLAS return
# depends on the number of threads and on the CPU, and so does any sum in one call. Here are only operations of which
# IEEE 754 defines each element (products, sums, differences, quotients and roots), one a call, so that none is fused
# with another.
def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of a matrix's columns, in float64, by modified Gram-Schmidt.

    A column that depends linearly on earlier columns becomes zero. Non-finite values remain non-finite.
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
    """Yield the product of two matrices, [rows, rank] and [rank, columns], in blocks of rows.

    Yields:
        Each range of rows with its product. All blocks reuse the same memory, so that it stays in the CPU's cache.
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
    """Return the sum of each row, [..., 1], by adding halves until a single element is left; overwrites `vectors`."""
    size = vectors.shape[-1]
    while size > 1:
        half = size // 2
        vectors[..., :half].add_(vectors[..., size - half : size])
        size -= half
    return vectors[..., :1].clone()
