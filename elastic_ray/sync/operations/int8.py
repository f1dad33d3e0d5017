"""All-reduce of gradients as 8-bit whole numbers with a scale for every block (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.sync.operations.protocol import GradientCollectives

BLOCK = 2048
"""Elements that have one scale."""

# A scale below this would have no reciprocal; gradients that small round to zero.
_SMALLEST = 1e-30
_SCALE_BYTES = 4


class Int8Compression:
    """See ``Compression``, which this is.

    Each rank sends every other its share of the vector as 8-bit numbers (all-to-all), adds up the shares that it gets
    in float32, rounds the sum again, and all gather these: 2 (W - 1) / W bytes an element and rank at W ranks, against
    8 (W - 1) / W of float32, and never more than other collectives would move. What a rank's own rounding leaves out
    is its residual, and so is what its rounding of the sum does: their sum over the ranks is exactly what is missing.

    Blocks that hold a value which is not finite arrive as such, on all ranks.
    """

    def __init__(self) -> None:
        self._work = torch.empty(0)  # the vector, padded to whole blocks: [ranks, blocks, BLOCK]
        self._sent = self._received = self._mine = torch.empty(0, dtype=torch.uint8)
        self._rank = 0

    def launch(self, params: Sequence[torch.Tensor], vector: torch.Tensor, group: GradientCollectives) -> Sequence[Any]:
        """Every rank's share to it."""
        world, self._rank = group.world_size, group.rank
        blocks = -(-vector.numel() // (BLOCK * world))
        if self._work.shape != (world, blocks, BLOCK):
            packed = (world, blocks * (BLOCK + _SCALE_BYTES))
            self._work = torch.zeros(world, blocks, BLOCK, device=vector.device)
            self._sent, self._received = (torch.empty(packed, dtype=torch.uint8, device=vector.device) for _ in "ab")
            self._mine = torch.empty(packed[1], dtype=torch.uint8, device=vector.device)
        self._work.view(-1)[: vector.numel()].copy_(vector)
        self._work.view(-1)[vector.numel() :].zero_()
        _quantise(self._work, self._sent)
        self._work.sub_(_dequantised(self._sent, blocks))
        return (group.all_to_all(self._received, self._sent),)

    def go_on(
        self, vector: torch.Tensor, left_out: torch.Tensor | None, group: GradientCollectives, finished: int
    ) -> Sequence[Any]:
        """The sum of this rank's share to all of them; then everything is there."""
        blocks = self._work.shape[1]
        if finished == 1:
            share = _dequantised(self._received, blocks).sum(0)
            _quantise(share, self._mine)
            self._work[self._rank].add_(share).sub_(_dequantised(self._mine, blocks))
            return (group.all_gather(self._received.view(-1), self._mine),)
        vector.copy_(_dequantised(self._received, blocks).view(-1)[: vector.numel()])
        if left_out is not None:
            left_out.copy_(self._work.view(-1)[: vector.numel()])
        return ()

    def commit(self) -> None:
        """It keeps nothing itself."""

    def void(self) -> None:
        """Leave buffers to collectives that were given up."""
        self._work = torch.empty(0)

    def drop(self) -> None:
        """It keeps nothing itself."""

    def factors(self) -> dict[int, torch.Tensor]:
        """None."""
        return {}

    def take_factors(self, factors: dict[int, torch.Tensor]) -> None:
        """There are none."""


def _quantise(values: torch.Tensor, packed: torch.Tensor) -> None:
    """[..., blocks, BLOCK] float32 into [..., blocks * (BLOCK + 4)] bytes: the numbers, then the blocks' scales."""
    blocks = values.shape[-2]
    # Faster than the largest absolute value in one, by 7 times on CPUs; either is NaN where a value is.
    largest = torch.maximum(values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True)).clamp_(min=_SMALLEST)
    numbers = (values * (127.0 / largest)).round_()
    packed[..., : blocks * BLOCK].view(torch.int8).copy_(numbers.view(*values.shape[:-2], blocks * BLOCK))
    packed[..., blocks * BLOCK :].view(torch.float32).copy_((largest / 127.0).squeeze(-1))


def _dequantised(packed: torch.Tensor, blocks: int) -> torch.Tensor:
    """The inverse, but for the rounding."""
    numbers = packed[..., : blocks * BLOCK].view(torch.int8).to(torch.float32)
    scales = packed[..., blocks * BLOCK :].view(torch.float32)
    return numbers.view(*packed.shape[:-1], blocks, BLOCK).mul_(scales.unsqueeze(-1))
