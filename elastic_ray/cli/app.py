"""The command ``elastic-ray``: its subcommands, and their shared error handling."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click
from click.shell_completion import get_completion_class

from placement.text import first_line, printable
from placement.versions import RELEASE

_HOMES = {
    "submit": "submit",
    "jobs": "jobs",
    "status": "observe.status",
    "logs": "jobs",
    "stack": "jobs",
    "stop": "jobs",
    "pause": "jobs",
    "resume": "jobs",
    "resize": "jobs",
    "branch": "branch",
    "usage": "usage",
    "verify": "verify",
    "nodes": "overview",
    "drain": "drain",
    "allocator": "overview",
    "top": "observe.top",
    "dashboard": "observe.dashboard",
    "metrics": "observe.metrics",
    "simulate": "what_if",
    "doctor": "doctor",
    "completion": "app",
}


class Commands(click.Group):
    """Group of commands, each imported only when called, so that ``--help`` and completion do not wait for Ray."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names, in the order a user needs them."""
        return list(_HOMES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command with this name; None if it does not exist."""
        if name not in _HOMES:
            return None
        command: click.Command = getattr(import_module(f"elastic_ray.cli.{_HOMES[name]}"), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ray's errors are shown as one line; bugs in this package keep their traceback."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if error.message.isprintable():
                raise
            usage = isinstance(error, click.UsageError)
            raise (click.UsageError if usage else click.ClickException)(printable(error.message)) from error
        except Exception as error:
            ray = sys.modules.get("ray")
            if ray is not None and isinstance(error, ray.exceptions.RayError | ConnectionError):
                raise click.ClickException(printable(f"the cluster did not answer: {first_line(error)}")) from error
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version=RELEASE)
def cli() -> None:
    """Elastic PyTorch jobs on Ray: submit jobs, watch them, change their size, and see the reasons for it.

    Connects to the same cluster as `ray`: the one at RAY_ADDRESS, otherwise the one on this machine. Exit codes: 0
    success; 1 the job failed, does not exist or cannot be reached; 2 wrong usage.
    """


def main() -> None:
    """Run the installed command ``elastic-ray``."""
    cli(prog_name="elastic-ray")


@click.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script; put eval "$(elastic-ray completion bash)" in its start-up file."""
    from elastic_ray.cli.app import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click has it for every shell of the choice"
    click.echo(kind(cli, {}, "elastic-ray", "_ELASTIC_RAY_COMPLETE").source())
