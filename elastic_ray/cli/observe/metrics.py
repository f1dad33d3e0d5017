"""``elastic-ray metrics``: what Prometheus and Grafana need to show jobs and cluster."""

from __future__ import annotations

from importlib.resources import files

import click

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


@click.group(short_help="For Prometheus and Grafana.")
def metrics() -> None:
    """Print what Prometheus and Grafana need to show jobs and cluster (docs/metrics.md)."""


@metrics.command(short_help="Print the Grafana dashboard as JSON.")
@click.option("--honor-labels", is_flag=True, help="For a Prometheus that scrapes Ray with `honor_labels: true`.")
def dashboard(honor_labels: bool) -> None:
    """Print the Grafana dashboard as JSON, to be imported: elastic-ray metrics dashboard > dashboard.json

    Ray's own Grafana finds it by itself once a job has run.
    """
    click.echo(read_dashboard(honor_labels=honor_labels), nl=False)
