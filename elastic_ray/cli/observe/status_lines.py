"""Lines of text on a job's progress, on how its time was spent, and on what it waits for (pure)."""

from __future__ import annotations

import math

from elastic_ray.cli.listings import JobRow
from elastic_ray.events import named_parts
from placement.text import ago


def outlook_lines(row: JobRow) -> tuple[str, ...]:
    """Return the lines printed after a job's status line: progress, time, waits, GPUs; unknown facts are left out."""
    lines = (_waits(row), _left(row), _time(row), _gpus(row), _pause(row))
    return tuple(line for line in lines if line)


def _waits(row: JobRow) -> str:
    """Return text such as ``waits for 2 slots (GPU 1) on T4; about 3m05s until they are there``."""
    if not row.waits_for:
        return ""
    known = row.start_s is not None and math.isfinite(row.start_s)
    return f"waits for {row.waits_for}" + (f"; about {ago(row.start_s or 0.0)} until they are there" if known else "")


def _left(row: JobRow) -> str:
    """Return text such as ``42% done; 3m05s left (2m10s to 4m00s), 12345 samples, 500 steps``."""
    left = [until_end(row)] if until_end(row) else []
    left += [f"{row.samples_left} samples"] if row.samples_left is not None else []
    left += [f"{row.tokens_left} tokens"] if row.tokens_left is not None else []
    left += [f"{row.steps_left} steps"] if row.steps_left is not None else []
    done = f"{percent(row.progress)} done" if percent(row.progress) else ""
    return "; ".join(part for part in (done, "left: " + ", ".join(left) if left else "") if part)


def until_end(row: JobRow) -> str:
    """Return the time to the job's end as text such as ``3m05s (2m10s to 4m00s)``; empty if it is unknown."""
    if row.eta_s is None or not math.isfinite(row.eta_s):
        return ""
    low_s, high_s = row.eta_low_s, row.eta_high_s
    known = low_s is not None and high_s is not None and math.isfinite(low_s) and math.isfinite(high_s)
    return ago(row.eta_s) + (f" ({ago(low_s or 0.0)} to {ago(high_s or 0.0)})" if known else "")


def percent(share: float | None) -> str:
    """Return a share (0 to 1) as text such as ``42%``; empty if it is unknown or not finite."""
    return f"{share:.0%}" if share is not None and math.isfinite(share) else ""


def _time(row: JobRow) -> str:
    """Return text such as ``10m00s since its submission: training 80%, starting 5%, waiting 15%``."""
    parts = named_parts(row)
    whole_s = sum(parts.values())
    if not (whole_s > 0 and math.isfinite(whole_s)):
        return ""
    shares = (f"{name} {seconds / whole_s:.0%}" for name, seconds in parts.items() if seconds > 0)
    return f"{ago(whole_s)} since its submission: " + ", ".join(shares)


def _gpus(row: JobRow) -> str:
    """Return text such as ``GPUs: 31.2 GiB used, 40.0 reserved; nccl; 512 samples/s each; MFU 38%``."""
    parts = []
    if row.gpu_memory_used_bytes is not None and row.gpu_memory_reserved_bytes is not None:
        used, reserved = (each / (1 << 30) for each in (row.gpu_memory_used_bytes, row.gpu_memory_reserved_bytes))
        parts.append(f"{used:.1f} GiB used, {reserved:.1f} reserved")
        parts += [row.backend] if row.backend else []
        parts += [f"{row.throughput / row.workers:.4g} samples/s each"] if row.workers and row.throughput else []
        parts.append(f"MFU {percent(row.mfu) or 'unknown'}")
    bound = f"{row.memory_bound} samples at once at most" if row.memory_bound is not None else ""
    return "; ".join(part for part in ("GPUs: " + "; ".join(parts) if parts else "", bound) if part)


def _pause(row: JobRow) -> str:
    """Return text such as ``last pause 0.18 s: vote 0.01, group 0.05, state 0.12; first step after it 0.30 s``."""
    pause = row.last_pause
    if pause is None:
        return ""
    first = f"; first step after it {pause.first_step_s:.2f} s" if pause.first_step_s is not None else ""
    parts = f"vote {pause.vote_s:.2f}, group {pause.group_s:.2f}, state {pause.state_s:.2f}"
    return f"last pause {pause.pause_s:.2f} s: {parts}{first}"
