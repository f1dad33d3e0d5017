"""The Grafana dashboard's panels as a test reads them, and samples of Prometheus' text."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator

from elastic_ray.cli.observe.metrics import read_dashboard

_METRIC = re.compile(r"ray_(elastic_[a-z0-9_]+)")
_LINE = re.compile(r"^ray_(elastic_[a-z0-9_]+)\{(.*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@contextlib.contextmanager
def reports_every_second() -> Iterator[None]:
    """Ray's processes that start meanwhile send their metrics every second instead of every ten."""
    name = "RAY_metrics_report_interval_ms"  # not by _system_config, which Ray's agent does not read
    os.environ[name] = "1000"
    try:
        yield
    finally:
        del os.environ[name]


def queries(job: str = ".*", tenant: str = ".*") -> dict[str, list[str]]:
    """Every panel's queries by its title, the variables filled in as Grafana does."""
    panels = json.loads(read_dashboard())["panels"]
    return {
        panel["title"]: [each["expr"].replace("$job", job).replace("$tenant", tenant) for each in panel["targets"]]
        for panel in panels
        if panel["type"] != "row"
    }


def metrics_of(expression: str) -> set[str]:
    """Names of our metrics in a query, without ``ray_`` and a histogram's suffix."""
    return {name.removesuffix("_bucket") for name in _METRIC.findall(expression)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """One line of a node's metrics: name without ``ray_``, labels, value."""

    name: str
    labels: dict[str, str]
    value: float


def scraped(text: str) -> list[Scraped]:
    """Our metrics in what Ray's agent serves."""
    found = []
    for line in text.splitlines():
        if (match := _LINE.match(line)) is not None:
            labels = {
                name: re.sub(r'\\[n"\\]', lambda each: _ESCAPED[each[0]], value)
                for name, value in _LABEL.findall(match[2])
            }
            found.append(Scraped(name=match[1], labels=labels, value=float(match[3])))
    return found
