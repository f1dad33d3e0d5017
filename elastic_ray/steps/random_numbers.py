"""SHELL: torch's generators of a rank, so that no two draw the same dropout masks, and none those of before."""

from __future__ import annotations

import hashlib

import torch

_BYTES = 7


def fold_generators(rank: int, generation: int, steps: int, *, joined: bool) -> None:
    """Have torch's generators go on with numbers of this rank's own.

    Ranks are seeded alike, so that they build the same model. From their first group on each draws for other samples.
    The first rank of a run that begins goes on as it is: alone, a program draws what it does without elastic-ray.

    Args:
        rank: of this worker in the first group that it enters.
        generation: of that group.
        steps: of all loaders that are committed; more than 0 for a run that goes on.
        joined: the group was there before.
    """
    if rank or joined or steps:
        text = f"{torch.initial_seed()} {generation} {rank} {steps}"
        digest = hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()
        torch.manual_seed(int.from_bytes(digest, "big"))
