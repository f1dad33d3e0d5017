"""Restriction of linear algebra to one thread, since all linear systems are tiny and waking threads costs seconds."""

from __future__ import annotations

import contextlib
import os

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that NumPy's linear algebra reads when it is loaded."""


def ask_for_one() -> None:
    """Limit linear algebra to one thread; only effective before NumPy is imported, and in processes started later."""
    for variable in VARIABLES:
        os.environ.setdefault(variable, "1")


def one_thread() -> contextlib.AbstractContextManager[object]:
    """Return a context with one thread for linear algebra; no effect without ``threadpoolctl`` (from scikit-learn)."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return contextlib.nullcontext()
    limits: contextlib.AbstractContextManager[object] = threadpool_limits(1)
    return limits
