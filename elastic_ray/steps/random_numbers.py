"""SHELL: a rank's random generators, so that ranks draw different dropout masks and never repeat earlier ones."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

_BYTES = 7

_alike: np.ndarray[Any, Any] | None = None  # NumPy's state as seed_alike has left it


def seed_alike(job: str) -> None:
    """Seed torch's and NumPy's generators identically on all workers of a job, including joiners and restarts.

    Anything that code creates without an explicit seed (synthetic data, a ``random_split`` or ``train_test_split``) is
    then the same on all workers. Programs that seed their generators do so later and are not affected.
    """
    digest = hashlib.blake2b(job.encode(), digest_size=_BYTES).digest()
    global _alike
    seed = int.from_bytes(digest, "big")
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    np.random.random_sample()  # noqa: NPY002  the words are made with the first draw
    _alike = _numpy_state()


def _numpy_state() -> np.ndarray[Any, Any]:
    """Return the state words of NumPy's generator, which change only every 624 draws."""
    words: np.ndarray[Any, Any] = np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002
    return words.copy()


def fold_generators(rank: int, generation: int, steps: int, *, joined: bool) -> None:
    """Give torch's generators a random sequence per rank; NumPy's too, unless the program seeded it.

    Ranks are seeded identically so that they build the same model. From its first group on, each rank draws different
    numbers for its different samples. The first rank of a fresh run keeps its generators, so that a program running
    alone draws the same numbers as without elastic-ray.

    Args:
        rank: Rank of this worker in the first group that it enters.
        steps: Number of committed steps across all loaders; above 0 for a run that continues.
    """
    if rank or joined or steps:
        text = f"{torch.initial_seed()} {generation} {rank} {steps}"
        digest = hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()
        torch.manual_seed(int.from_bytes(digest, "big"))
        if _alike is not None and np.array_equal(_numpy_state(), _alike):
            np.random.seed(int.from_bytes(digest[:4], "big"))  # noqa: NPY002
