"""SHELL: jobs of a head that has ended are submitted to this one, by a process beside the allocator.

What submits them is of a package above this one: it is started as a command, by name.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

from placement.text import printable

logger = logging.getLogger("placement.resume")

_COMMAND = ("-m", "elastic_ray.cli", "resume", "--all")
_LONGEST_S = 600.0


def resume_jobs(storage: str, cluster: str) -> None:
    """Submit what ran when another head ended, and log what is said of it; returns at once.

    Args:
        cluster: HOST:PORT of this cluster's control store.
    """
    threading.Thread(target=_run, args=(storage, cluster), name="resume", daemon=True).start()


def _run(storage: str, cluster: str) -> None:
    """Run the command to its end."""
    try:
        done = subprocess.run(
            [sys.executable, *_COMMAND, storage],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "RAY_ADDRESS": cluster},
            timeout=_LONGEST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("jobs of %s are not resumed: %s; try `elastic-ray resume --all %s`", storage, error, storage)
        return
    for line in done.stdout.splitlines():
        logger.log(logging.WARNING if done.returncode else logging.INFO, "%s", printable(line))
