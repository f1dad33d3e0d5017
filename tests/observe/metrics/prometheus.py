"""A real Prometheus that scrapes a test's Ray cluster, for tests."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.local_cluster import free_port

_CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: ray
    honor_labels: {honor}
    file_sd_configs: [{{files: ['{discovery}'], refresh_interval: 1s}}]
"""


def missing() -> str:
    """Why there is none here; empty if there is."""
    return "" if shutil.which("prometheus") else "prometheus is not installed"


class Prometheus:
    """One that runs.

    Args:
        port: of its HTTP API.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=2):
                return True
        except OSError:
            return False

    def at_once(self, expression: str) -> list[dict[str, Any]]:
        """Series of a query now."""
        return self._ask("query", query=expression)

    def over(self, expression: str, since_s: float) -> list[dict[str, Any]]:
        """Series of a query from then on, as a panel asks; those whose values are all NaN are left out."""
        found = self._ask("query_range", query=expression, start=str(since_s), end=str(time.time()), step="1")
        return [each for each in found if any(value != "NaN" for _, value in each["values"])]

    def _ask(self, what: str, **arguments: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=180) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments['query']}: {error.read().decode()}") from None
        found: list[dict[str, Any]] = told["data"]["result"]
        return found


@contextlib.contextmanager
def prometheus(folder: Path, discovery: Path, *, honor_labels: bool = False) -> Iterator[Prometheus]:
    """Start one on loopback with its data in ``folder``; it ends with the block.

    Args:
        folder: for its data.
        discovery: Ray's file of what is to be scraped.
        honor_labels: as in its configuration.
    """
    config, port = folder / "prometheus.yml", free_port()
    config.write_text(_CONFIG.format(discovery=discovery, honor=str(honor_labels).lower()))
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(timeout=180)
