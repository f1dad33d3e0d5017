"""SHELL: output and thread stacks of a worker's process, read by a Ray task on the worker's node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray._private.worker as ray_worker
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ray.events import WorkerInfo
from placement.cluster.cluster import parts
from placement.text import first_line, printable_lines

MOST_BYTES = 64 * 1024  # of each of the two files that a process prints into
_STACK_S = 10.0
_LOOK_S = 40.0  # a process may have to start for it


class LookRefusedError(Exception):
    """Error raised if a process cannot be inspected; the message gives the reason and a remedy."""


def inspect_process(worker: WorkerInfo, what: str) -> str:
    """Return the last output of a worker's process (``what="logs"``) or its threads' stacks (``"stack"``)."""
    look = {"logs": _logs, "stack": read_stack}[what]
    node = next(iter(parts(worker.node)))  # of a unit that spans nodes, which names its first process
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    call = task.remote(worker.pid)
    try:
        text, refused = ray.get(call, timeout=_LOOK_S)
    except GetTimeoutError:
        ray.cancel(call, force=True)
        raise LookRefusedError(f"node {node[:8]} has not answered within {_LOOK_S:g} s; ask again") from None
    except RayError as error:
        first = first_line(getattr(error, "cause", None) or error)
        raise LookRefusedError(f"node {node[:8]} did not answer: {first}") from None
    if refused:
        raise LookRefusedError(f"process {worker.pid} on node {node[:8]}: {refused}")
    return printable_lines(text)


def _logs(pid: int) -> tuple[str, str]:
    """Return the last output of a process on this node, and the reason if it has none."""
    node: Any = ray_worker._global_node
    return read_logs(Path(node.get_session_dir_path()) / "logs", pid)


def read_logs(folder: Path, pid: int) -> tuple[str, str]:
    """Return the last output of process ``pid``, from log files in ``folder``, and why it is missing, or ""."""
    found: Mapping[str, list[Path]] = {end: sorted(folder.glob(f"worker-*-{pid}.{end}")) for end in ("out", "err")}
    parts = []
    for end, paths in found.items():
        for path in paths:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(size - MOST_BYTES, 0))
                text = file.read(MOST_BYTES).decode("utf-8", "replace")
            cut = f", the last {MOST_BYTES // 1024} KiB" if size > MOST_BYTES else ""
            parts += [f"--- std{end}{cut} ---\n{text.rstrip()}"] if text.strip() else []
    if not any(found.values()):
        return "", "Ray keeps no files of what it prints; it may have ended"
    return "\n".join(parts) or "it has printed nothing yet", ""


def read_stack(pid: int) -> tuple[str, str]:
    """Return the thread stacks of local process ``pid``, read with py-spy, and why they cannot be read, or ""."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}") or shutil.which("py-spy")
    if spy is None:
        return "", "py-spy is not installed there; `pip install 'ray[default]'` brings it"
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_STACK_S)
    except subprocess.TimeoutExpired:
        return "", f"py-spy has not answered within {_STACK_S:g} s; ask again"
    if done.returncode == 0:
        return done.stdout, ""
    if any(word in done.stderr.lower() for word in ("permission denied", "ptrace", "not permitted")):
        return "", "py-spy may not read it: its node does not allow ptrace; containers need the capability SYS_PTRACE"
    return "", f"py-spy cannot read it: {(done.stderr.strip() or 'it has ended').splitlines()[0]}"
