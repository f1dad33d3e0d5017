"""Indices of a step by rank and micro-step, as tests of the data order take them."""

from __future__ import annotations

from elastic_ray.data.sharding import Indices, rank_slices


def rank_indices(step_indices: Indices, *, rank: int, world_size: int, micro_steps: int = 1) -> list[Indices]:
    """The indices that ``rank`` takes in each micro-step of the step that uses ``step_indices``."""
    slices = rank_slices(len(step_indices), rank=rank, world_size=world_size, micro_steps=micro_steps)
    return [step_indices[piece] for piece in slices]
