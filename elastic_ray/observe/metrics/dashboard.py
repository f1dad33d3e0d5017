"""The Grafana dashboard, an asset of this package (pure but for reading it)."""

from __future__ import annotations

from importlib.resources import files

ASSET = "grafana.json"
_RENAMED = "exported_job"


def read_dashboard(*, honor_labels: bool = False) -> str:
    """Return the dashboard as JSON.

    Prometheus names the job of its own configuration ``job``, and the metrics' label of that name ``exported_job``
    then; where it is configured with ``honor_labels: true``, it leaves the metrics' label as it is.

    Args:
        honor_labels: for a Prometheus that is configured so.
    """
    text = (files("elastic_ray.observe.metrics") / ASSET).read_text(encoding="utf-8")
    return text.replace(_RENAMED, "job") if honor_labels else text
