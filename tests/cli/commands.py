"""Commands in this process, which is connected to a cluster already."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from elastic_ray.cli.app import cli


def run(cluster: Any, *arguments: str, code: int = 0) -> Result:
    """The command in this process, which is connected already."""
    result = CliRunner().invoke(cli, arguments, env={"RAY_ADDRESS": cluster.address, "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result
