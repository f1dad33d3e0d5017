"""SHELL: the dashboard page in its own process beside the allocator, so that it never delays the allocator.

The page belongs to a higher-level package, so it is started by name, as a command.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import IO, Any

from placement.text import printable

logger = logging.getLogger("placement.dashboard")

_COMMAND = ("-m", "elastic_ray.cli", "dashboard", "--attached", "--read-only")
_SAYS = "dashboard: "


class DashboardProcess:
    """Process that serves the dashboard page. It ends when the process that started it ends or calls ``stop``."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self.address = ""  # of the page; empty while it is not served
        self._input: IO[str] | None = None
        self._stopped = False
        threading.Thread(target=self._run, name="dashboard", daemon=True).start()

    def stop(self) -> None:
        """Stop the process by closing its standard input."""
        self._stopped = True
        if self._input is not None:
            self._input.close()

    def _run(self) -> None:
        """Start the page and read its output until it ends. If the page fails, a warning is logged."""
        try:
            command = [sys.executable, *_COMMAND]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, **_options(self._cluster))
        except OSError as error:
            logger.warning("the dashboard cannot be started: %s", error)
            return
        assert process.stdout is not None, "asked for"
        self._input = process.stdin
        if self._stopped:
            self.stop()
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            if line.startswith(_SAYS):
                self.address = line.removeprefix(_SAYS).strip()
                logger.info("dashboard: %s", self.address)
        self.address = ""
        code = process.wait()
        if not self._stopped:
            logger.warning("the dashboard has ended with code %d: %s", code, printable(last))


def _options(cluster: str) -> dict[str, Any]:
    """Return subprocess options for a command: how its output is read, and its environment."""
    env = {**os.environ, "RAY_ADDRESS": cluster}
    return {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace", "env": env}


_RESUME = ("-m", "elastic_ray.cli", "resume", "--all")
_LONGEST_S = 600.0
resuming = logging.getLogger("placement.resume")


def resume_jobs(storage: str, cluster: str) -> None:
    """Resubmit, in the background, the jobs under ``storage`` that ran when their head node died; log the output."""
    threading.Thread(target=_run, args=(storage, cluster), name="resume", daemon=True).start()


def _run(storage: str, cluster: str) -> None:
    """Run the command until it ends."""
    try:
        command = [sys.executable, *_RESUME, storage]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_LONGEST_S, check=False, **_options(cluster))
    except (OSError, subprocess.TimeoutExpired) as error:
        resuming.warning("jobs of %s are not resumed: %s; try `elastic-ray resume --all %s`", storage, error, storage)
        return
    for line in done.stdout.splitlines():
        resuming.log(logging.WARNING if done.returncode else logging.INFO, "%s", printable(line))
