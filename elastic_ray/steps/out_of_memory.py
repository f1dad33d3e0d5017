"""Recognition of out-of-memory errors, and release of the memory that a failed pass holds (torch)."""

from __future__ import annotations

import gc
import re
import traceback

import torch

# Texts of plain errors: of CUDA outside torch's allocator (pinned memory, kernels, a driver call), also in an error of
# torch.compile; of cuBLAS, cuDNN, cuSOLVER, cuSPARSE and cuFFT; of torch's CPU allocator; of C++.
_TEXTS = re.compile(r"\b(CUDA|HIP|MPS)\b.*\bout of memory|_ALLOC_FAILED\b|can't allocate memory|std::bad_alloc")


class EvaluationMemoryError(torch.OutOfMemoryError):
    """Raised if a forward pass without gradients runs out of memory, and cannot be computed in parts.

    Attributes:
        samples: Number of samples that its loader, which divides batches for an evaluation, gives at once; 0 if the
            batch is not of such a loader.
    """

    samples = 0


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error means that an allocation in host or GPU memory failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def let_go(error: BaseException) -> None:
    """Free memory after ``error``: the objects held by the failed pass's frames, and the GPU allocator's caches."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    free_caches()


def free_caches() -> None:
    """Collect garbage, and return cached blocks to the GPU."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def gpu_memory() -> tuple[int, int] | None:
    """Return the peak memory allocated and reserved by this process on its GPU [bytes]; None without a GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
