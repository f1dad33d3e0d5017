"""Commands that the README and docs/ show are accepted by the programs that they call."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from elastic_ray.cli.app import cli
from placement.simulator.cli import parser as simulator_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[str]:
    """Commands of a page's shell blocks, and of its inline code that begins as one."""
    text, found = page.read_text(), []
    for language, body in re.findall(r"^ *```(sh|bash|console)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        lines = body.replace("\\\n", " ").splitlines()
        found += [
            line.strip().removeprefix("$ ")
            for line in lines
            if line.strip() and (language != "console" or line.lstrip().startswith("$ "))
        ]
    inline = re.findall(r"`((?:elastic-ray|python examples/|python -m placement)[^`]* [^`]*)`", text)
    return [*found, *inline]


SHOWN = sorted({(page.name, command) for page in PAGES for command in commands(page)})


def check_click(arguments: list[str]) -> None:
    """Raise click's usage error where the command line would not accept these."""
    context = click.Context(cli, info_name="elastic-ray")
    name, command, rest = cli.resolve_command(context, arguments)
    if command is not None and rest:  # a command may be named in a sentence, without its arguments
        command.make_context(name, list(rest), parent=context)


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_shown_command_is_accepted(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["bash", "-n", "-c", command], check=True)
    monkeypatch.chdir(tmp_path)
    for file in ("train.py", "SCRIPT", "cluster-policy.yaml"):
        (tmp_path / file).touch()
    (tmp_path / "job.yaml").write_text("script: train.py\n")
    for part in re.split(r"&&|\|\|", command):
        words = shlex.split(part, comments=True)
        match words:
            case ["elastic-ray", "simulate", *rest] if "--live" not in rest:
                simulator_parser().parse_args(rest)
            case ["elastic-ray", *rest]:
                check_click(rest)
            case ["python", "-m", "placement.simulator", *rest]:
                simulator_parser().parse_args(rest)
            case ["python", "-m", module, *_] if module.startswith(("placement.", "elastic_ray.", "tuning.")):
                assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
            case ["python", script, *options] if script.endswith(".py"):
                source = (ROOT / script).read_text()
                flags = [word for word in options if word.startswith("--")]
                assert [flag for flag in flags if f'"{flag}"' not in source] == []
            case ["pytest", *options]:
                assert [word for word in options if word.endswith(".py") and not (ROOT / word).exists()] == []


def test_the_pages_show_commands() -> None:
    assert len(SHOWN) > 20
