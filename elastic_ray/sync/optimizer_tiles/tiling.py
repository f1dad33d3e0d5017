"""Division of a model's parameters into tiles, independent of the group that holds them (pure)."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import json
from collections.abc import Iterable, Sequence

from elastic_ray.state.layout import digest
from elastic_ray.sync.plan import ModelProfile, ParamInfo
from elastic_ray.sync.spec import Owner

# Enough to balance a group of 8 within some percent. A small model has fewer: a call takes longer than its memory.
_MOST_TILES = 64
_FEWEST_ELEMENTS = 64
_MOST_PARTS = 64
_ALIGNED = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Consecutive elements of a flattened parameter."""

    name: str  # of the parameter, the first of its names
    start: int  # first element, of the parameter as a vector
    length: int  # elements
    whole: bool  # whether it is the whole parameter, in its shape


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Division of a model's parameters into tiles, with each tile a tuple of spans.

    All spans in a tile have the same dtype and device type.
    """

    tiles: tuple[tuple[Span, ...], ...]

    def __len__(self) -> int:
        return len(self.tiles)

    @functools.cached_property
    def digest(self) -> int:
        """40-bit digest that differs between tilings."""
        return digest(self.to_json())

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Names of all tiled parameters."""
        return frozenset(span.name for tile in self.tiles for span in tile)

    def elements(self, tile: int) -> int:
        """Return the number of parameter elements in one tile."""
        return sum(span.length for span in self.tiles[tile])

    def to_json(self) -> str:
        """Return the tiling as text for :meth:`from_json`."""
        return json.dumps([[[each.name, each.start, each.length, each.whole] for each in tile] for tile in self.tiles])

    @classmethod
    def from_json(cls, text: str) -> Tiling:
        """Return the tiling described by the text from :meth:`to_json`."""
        return cls(tuple(tuple(Span(*each) for each in tile) for tile in json.loads(text)))


def cut(profile: ModelProfile, params: Iterable[int], owner: Owner) -> Tiling:
    """Return the division of parameters into tiles required by ``owner``; equal arguments give equal tilings.

    Args:
        profile: Profile of the model; tensors are not cut if their optimizer is not element-wise.
    """
    tiles: list[tuple[Span, ...]] = []
    chosen = [profile.params[i] for i in params]
    total = sum(param.nbytes for param in chosen)
    kinds: dict[tuple[str, str], list[ParamInfo]] = {}
    for param in chosen:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    for mine in kinds.values():
        nbytes = sum(param.nbytes for param in mine)
        most = max(1, round(_MOST_TILES * nbytes / total)) if total else 1
        divisible = [param for param in mine if param.divisible and profile.optimizer_of(param).elementwise]
        whole = [param for param in mine if not (param.divisible and profile.optimizer_of(param).elementwise)]
        pieces = [Span(param.name, 0, param.numel, True) for param in whole]
        if owner.cut == "equal":
            tiles += _equal(divisible, most)
        else:
            pieces += [piece for param in divisible for piece in _parts(param, even=owner.cut == "divisor")]
        tiles += _binned(pieces, most)
    return Tiling(tuple(tiles))


def _equal(params: Sequence[ParamInfo], most: int) -> list[tuple[Span, ...]]:
    """Return tiles with roughly equal numbers of elements, which may span several tensors."""
    total = sum(param.numel for param in params)
    count = max(1, min(most, total // _FEWEST_ELEMENTS))
    ends = [total * (i + 1) // count for i in range(count)]
    tiles: list[list[Span]] = [[] for _ in ends]
    tile, position = 0, 0
    for param in params:
        start = 0
        while start < param.numel:
            # Kernels treat the last few elements of a tensor in another way: a cut must not make others the last.
            length = -(-max(0, ends[tile] - position) // _ALIGNED) * _ALIGNED
            if tile == count - 1 or length > param.numel - start:
                length = param.numel - start
            if length:
                tiles[tile].append(Span(param.name, start, length, length == param.numel))
            start, position = start + length, position + length
            if tile < count - 1 and position >= ends[tile]:
                tile += 1
    return [tuple(spans) for spans in tiles if spans]


def _parts(param: ParamInfo, *, even: bool) -> list[Span]:
    """Return parts of a tensor along its first dimension, with the same number of parts as in AutoDist."""
    rows = param.shape[0] if param.shape else 1
    if rows < 2 or not param.numel:
        return [Span(param.name, 0, param.numel, True)]
    count = next(i for i in itertools.count(2) if (rows % i == 0) == even)
    count = min(count, rows, _MOST_PARTS)
    width = param.numel // rows
    ends = [rows * (i + 1) // count * width for i in range(count)]
    return [
        Span(param.name, start, end - start, end - start == param.numel)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
        if end > start
    ]


def _binned(pieces: Sequence[Span], most: int) -> list[tuple[Span, ...]]:
    """Return tiles of roughly equal size, formed by adding each piece, largest first, to the smallest tile so far."""
    pieces = [piece for piece in pieces if piece.length]
    count = min(len(pieces), most)
    heap = [(0, number) for number in range(count)]
    tiles: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(pieces)), key=lambda i: (-pieces[i].length, i)):
        size, number = heapq.heappop(heap)
        tiles[number].append(index)
        heapq.heappush(heap, (size + pieces[index].length, number))
    return [tuple(pieces[index] for index in sorted(tile)) for tile in tiles]
