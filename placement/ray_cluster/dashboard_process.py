"""SHELL: the page as a process of its own beside the allocator, so that it never takes the allocator's time.

The page is of a package above this one: it is started as a command, by name.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import IO

from placement.text import printable

logger = logging.getLogger("placement.dashboard")

_COMMAND = ("-m", "elastic_ray.cli", "dashboard", "--attached", "--read-only")
_SAYS = "dashboard: "


class DashboardProcess:
    """Runs while this process does: it reads its standard input, which ends with this process, however that ends.

    Args:
        cluster: HOST:PORT of the cluster's control store.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._address = ""
        self._input: IO[str] | None = None
        self._stopped = False
        threading.Thread(target=self._run, name="dashboard", daemon=True).start()

    @property
    def address(self) -> str:
        """Address of the page; empty until it is served, and after it has ended."""
        return self._address

    def stop(self) -> None:
        """End it: its standard input does."""
        self._stopped = True
        if self._input is not None:
            self._input.close()

    def _run(self) -> None:
        """Start it and hear what it says until it ends; a page that fails is reported, and costs nothing else."""
        try:
            process = subprocess.Popen(
                [sys.executable, *_COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, "RAY_ADDRESS": self._cluster},
            )
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
                self._address = line.removeprefix(_SAYS).strip()
                logger.info("dashboard: %s", self._address)
        self._address = ""
        code = process.wait()
        if not self._stopped:
            logger.warning("the dashboard has ended with code %d: %s", code, printable(last))
