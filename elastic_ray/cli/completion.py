"""``elastic-ray completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell: eval "$(elastic-ray completion bash)" in its start-up file."""
    from elastic_ray.cli.app import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click has it for every shell of the choice"
    click.echo(kind(cli, {}, "elastic-ray", "_ELASTIC_RAY_COMPLETE").source())
