"""Publishing of tensors by all-gathers, in rounds, of tiles that are valid on different ranks (torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastic_ray.communication.communicator import Communicator
from elastic_ray.sync.optimizer_tiles.states import part_of
from elastic_ray.sync.optimizer_tiles.tiling import Tiling

# Of a rank in one round: large enough for latency, and small enough for what arrives to be copied from a CPU's cache.
_ROUND_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class _Round:
    """Buffers and copies around one all-gather."""

    sent: Tensor
    received: Tensor
    packed: list[Tensor]
    packed_from: list[Tensor]
    given: list[Tensor]
    given_to: list[Tensor]


class Publisher:
    """Sender of tiles to all ranks, in rounds of all-gathers.

    Create a new publisher after a failed round, because that may still be writing to the old one's buffers.

    Args:
        senders: For each tile, the rank that has its valid values.
    """

    def __init__(
        self, tiling: Tiling, senders: Sequence[int], tensors: Mapping[str, Tensor], rank: int, world_size: int
    ) -> None:
        self._tensors = {name: tensors[name] for name in tiling.names}
        self._addresses = self._where()
        self._rounds: list[_Round] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
        for tile, sender in enumerate(senders):
            first = tensors[tiling.tiles[tile][0].name]
            by_rank = kinds.setdefault((first.dtype, first.device), [[] for _ in range(world_size)])
            by_rank[sender].append(tile)
        for (dtype, device), by_rank in kinds.items():
            for tiles in by_rank:
                tiles.sort(key=lambda tile: (-tiling.elements(tile), tile))
            self._add_rounds(tiling, by_rank, rank, dtype, device)

    def _add_rounds(
        self, tiling: Tiling, by_rank: Sequence[Sequence[int]], rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Add the rounds for one dtype's tensors; buffers alternate so that one round is always in flight."""
        largest = max(tiling.elements(tile) for tiles in by_rank for tile in tiles)
        together = max(1, _ROUND_BYTES // (largest * dtype.itemsize))
        chosen = [
            [tiles[first : first + together] for tiles in by_rank]
            for first in range(0, max(map(len, by_rank)), together)
        ]
        sizes = [max(sum(map(tiling.elements, tiles)) for tiles in each) for each in chosen]
        world, most = len(by_rank), max(sizes)
        buffers = [torch.empty((world + 1) * most, dtype=dtype, device=device) for _ in range(min(2, len(chosen)))]
        for number, (each, size) in enumerate(zip(chosen, sizes, strict=True)):
            buffer = buffers[number % 2]
            sent, received = buffer[:size], buffer[most : most + world * size]
            packed, packed_from = self._pairs(tiling, each[rank], sent)
            given, given_to = [], []
            for other, tiles in enumerate(each):
                if other != rank:
                    pieces, places = self._pairs(tiling, tiles, received[other * size : (other + 1) * size])
                    given += pieces
                    given_to += places
            self._rounds.append(_Round(sent, received, packed, packed_from, given, given_to))

    def _pairs(self, tiling: Tiling, tiles: Sequence[int], flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return pieces of a flat buffer, each with the corresponding part of a tensor."""
        pieces, places, position = [], [], 0
        for tile in tiles:
            for span in tiling.tiles[tile]:
                place = part_of(self._tensors[span.name], span)
                pieces.append(flat[position : position + span.length].view(place.shape))
                places.append(place)
                position += span.length
        return pieces, places

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors.values()]

    @property
    def is_outdated(self) -> bool:
        """True if any parameter has been moved to other memory, so that a new publisher is needed."""
        return self._where() != self._addresses

    @torch.no_grad()
    def run(self, communicator: Communicator) -> None:
        """Send each tile from a rank with valid values to all ranks; called on every rank."""
        before: tuple[_Round, object] | None = None
        for each in self._rounds:
            if each.packed:
                torch._foreach_copy_(each.packed, each.packed_from)
            work = communicator.gradients.all_gather(each.received, each.sent)
            if before is not None:
                _finish(communicator, *before)
            before = each, work
        if before is not None:
            _finish(communicator, *before)


def _finish(communicator: Communicator, each: _Round, work: object) -> None:
    communicator.wait(work)
    if each.given:
        torch._foreach_copy_(each.given_to, each.given)
