"""States of a program's default random generators (torch, NumPy, Python)."""

from __future__ import annotations

import random

import numpy as np
import torch


class Generators:
    """Snapshot of the random generators of torch (CPU and current GPU), NumPy and Python."""

    def __init__(self) -> None:
        self._cpu, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Restore the generators to the snapshot, so that they draw the same numbers again."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
