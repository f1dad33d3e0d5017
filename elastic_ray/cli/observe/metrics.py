"""``elastic-ray metrics``: prints the configuration that Prometheus and Grafana need to show jobs and the cluster."""

from __future__ import annotations

from importlib.resources import files

import click

ASSET = "grafana.json"
_RENAMED = "exported_job"


def read_dashboard(*, honor_labels: bool = False) -> str:
    """Return the Grafana dashboard as JSON.

    By default Prometheus uses the label ``job`` for its own scrape job and renames the metrics' label to
    ``exported_job``. With ``honor_labels: true`` in its configuration, it keeps the metrics' label ``job``.
    """
    text = (files("elastic_ray.observe.metrics") / ASSET).read_text(encoding="utf-8")
    return text.replace(_RENAMED, "job") if honor_labels else text


@click.group(short_help="For Prometheus and Grafana.")
def metrics() -> None:
    """Print the files that Prometheus and Grafana need to show jobs and the cluster (docs/metrics.md)."""


@metrics.command(short_help="Print the Grafana dashboard as JSON.")
@click.option("--honor-labels", is_flag=True, help="For a Prometheus that scrapes Ray with `honor_labels: true`.")
def dashboard(honor_labels: bool) -> None:
    """Print the Grafana dashboard as JSON, for import (elastic-ray metrics dashboard > dashboard.json).

    Ray's own Grafana finds the dashboard automatically once a job has run.
    """
    click.echo(read_dashboard(honor_labels=honor_labels), nl=False)
