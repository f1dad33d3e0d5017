"""Memory of this process: what it holds of the host's and of its device's."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def host_bytes() -> int:
    """Resident set of this process [bytes]; where the kernel has no ``/proc``, the largest that it had."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    try:
        return int(os.read(descriptor, 256).split()[1]) * _PAGE_BYTES
    finally:
        os.close(descriptor)


def device_bytes() -> int:
    """What torch's allocator holds of the present CUDA device [bytes]; 0 for a process that has not used one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())
