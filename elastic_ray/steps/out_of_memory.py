"""Errors of allocators without memory: how to recognise them, and how to free what a failed pass holds (torch)."""

from __future__ import annotations

import gc
import traceback

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocator had no memory left, of the host or of a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator raises a plain RuntimeError
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def let_go(error: BaseException) -> None:
    """Free what the frames of a failed pass hold, activations above all, and the caches of the GPU's allocator."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    free_caches()


def free_caches() -> None:
    """Collect garbage, and return cached blocks to the GPU."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def gpu_memory() -> tuple[int, int] | None:
    """Return the bytes that tensors of this process held of its GPU at most, and those reserved; None without one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
