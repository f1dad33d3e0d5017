"""SHELL: torch's generators of a rank, so that no two ranks draw the same dropout masks, nor earlier ones again."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

_BYTES = 7

_alike: np.ndarray[Any, Any] | None = None  # NumPy's state as seed_alike has left it


def seed_alike(job: str) -> None:
    """Have torch's and NumPy's generators begin alike on all workers of a job, also on those that join or start again.

    What code makes without a seed of its own, as synthetic data, a ``random_split`` or ``train_test_split``, is then
    one dataset for all of them. A program that seeds its generators does so after this.
    """
    digest = hashlib.blake2b(job.encode(), digest_size=_BYTES).digest()
    global _alike
    seed = int.from_bytes(digest, "big")
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    np.random.random_sample()  # noqa: NPY002  the words are made with the first draw
    _alike = _numpy_state()


def _numpy_state() -> np.ndarray[Any, Any]:
    """Return the words that NumPy's generator draws from; they stay the same for 624 draws."""
    words: np.ndarray[Any, Any] = np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002
    return words.copy()


def fold_generators(rank: int, generation: int, steps: int, *, joined: bool) -> None:
    """Let torch's generators continue with this rank's own numbers; NumPy's too unless the program seeded it.

    Ranks are seeded alike, so that they build the same model. From their first group on each draws for other samples.
    The first rank of a run that begins continues as it is: alone, a program draws what it does without elastic-ray.

    Args:
        rank: of this worker in the first group that it enters.
        steps: of all loaders that are committed; more than 0 for a run that continues.
    """
    if rank or joined or steps:
        text = f"{torch.initial_seed()} {generation} {rank} {steps}"
        digest = hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()
        torch.manual_seed(int.from_bytes(digest, "big"))
        if _alike is not None and np.array_equal(_numpy_state(), _alike):
            np.random.seed(int.from_bytes(digest[:4], "big"))  # noqa: NPY002
