"""``elastic-ray metrics``: what Prometheus and Grafana need to show jobs and cluster."""

from __future__ import annotations

import click

from elastic_ray.observe.metrics.dashboard import read_dashboard


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
