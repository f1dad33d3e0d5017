"""SHELL: torch's generators of a rank, so that no two draw the same dropout masks, and none those of before."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_BYTES = 7


def seed_alike(job: str) -> None:
    """Have torch's and NumPy's generators begin alike on all workers of a job, also on those that join or start again.

    What code makes without a seed of its own, as synthetic data, a ``random_split`` or ``train_test_split``, is then
    one dataset for all of them. A program that seeds its generators does so after this.
    """
    digest = hashlib.blake2b(job.encode(), digest_size=_BYTES).digest()
    seed = int.from_bytes(digest, "big")
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002


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
