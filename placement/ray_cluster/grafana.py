"""SHELL: the allocator's way to Prometheus, and the dashboard, placed where Ray's own Grafana looks for dashboards.

The file is an asset of a package above this one: it is found by name. Where Ray keeps its dashboards is no public
interface: whatever goes wrong is a line of the debug log.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import ray

from placement.ray_cluster.metric_writer import MetricWriter

logger = logging.getLogger("placement.metrics")

_FOLDER = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
_ROOT = "RAY_METRICS_OUTPUT_ROOT"
_ASSET = "elastic_ray.observe.metrics", "grafana.json"
FILE = "elastic_ray_grafana_dashboard.json"
"""Name of the placed file, beside Ray's."""


def cluster_writer(on: bool) -> MetricWriter | None:
    """Return the writer of the allocator's samples and place the dashboard meanwhile; None if metrics are off."""
    if not on:
        return None
    threading.Thread(target=place_dashboard, name="place dashboard", daemon=True).start()  # storage may hang
    return MetricWriter()


def place_dashboard() -> None:
    """Write the dashboard, on the head node; nothing is raised."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        package, name = _ASSET
        # Others may write in Ray's folders: a name that they cannot guess, and no link of theirs is followed.
        handle, unfinished = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
        with os.fdopen(handle, "wb") as file:
            file.write((files(package) / name).read_bytes())
        Path(unfinished).chmod(0o644)
        Path(unfinished).replace(folder / FILE)
    except Exception as error:
        logger.debug("the Grafana dashboard was not placed: %s", error)


def _folder() -> Path:
    """Return Grafana's folder as in ``ray.dashboard.modules.metrics.metrics_head`` of Ray 2.60."""
    if os.environ.get(_FOLDER):
        return Path(os.environ[_FOLDER])
    root = os.environ.get(_ROOT)
    private: Any = ray._private
    session = Path(private.worker._global_node.get_session_dir_path())
    return (Path(root) if root else session / "metrics") / "grafana" / "dashboards"
