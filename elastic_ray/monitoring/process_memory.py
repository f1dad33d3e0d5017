"""Memory of this process: what it holds of the host's and of its device's, and how near their ends are."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


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


def major_faults() -> int:
    """Pages that this process has had to fetch from a disk since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def memory_used() -> float:
    """Part that is taken, from 0 to 1, of what this process may use: the largest of host, control group and device."""
    return max(_host_used(_PROC), _group_used(_PROC, _CGROUPS), _device_used())


def _host_used(proc: Path) -> float:
    """Of the host's memory; 0 where the kernel does not tell."""
    lines = _text(proc / "meminfo").splitlines()
    told = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    total, available = told.get("MemTotal", 0), told.get("MemAvailable")
    return 1.0 - available / total if total > 0 and available is not None else 0.0


def _group_used(proc: Path, groups: Path) -> float:
    """Of what the process's control group (version 2) may use; 0 where it has no limit of its own.

    Cached files that nobody has used lately do not count: the kernel drops them first.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        if not line.startswith("0::"):
            continue
        folder = groups / line[3:].lstrip("/")
        limit, current = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and current.isdigit() and int(limit) > 0:
            stats = dict(row.split(" ", 1) for row in _text(folder / "memory.stat").splitlines() if " " in row)
            return max(0.0, min(1.0, (int(current) - int(stats.get("inactive_file", 0))) / int(limit)))
    return 0.0


def _device_used() -> float:
    """Of the present CUDA device's memory, by all of its users; 0 for a process that has not used one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return 1.0 - float(free) / float(total)


def _text(path: Path) -> str:
    """What a file of the kernel's says; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
