"""What a user types, right or wrong, before any cluster is needed."""

from __future__ import annotations

import datetime
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from elastic_ray.cli import submission as ray_jobs
from elastic_ray.cli.app import _HOMES, Commands, cli
from elastic_ray.cli.listings import JOB_COLUMNS, JobRow, job_cells
from elastic_ray.cli.output import rich_table, say, show_json, show_table
from elastic_ray.cli.submit import command
from elastic_ray.driver.overrides import Overrides, fresh_name


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_help_names_every_command_without_loading_ray_or_torch() -> None:
    code = "import sys; from elastic_ray.cli.app import cli\ntry: cli(['--help'])\nexcept SystemExit: pass\n"
    check = "print([name for name in ('ray', 'torch', 'numpy') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"
    for name in _HOMES:
        assert f"\n  {name} " in answer.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["frob"], "No such command 'frob'"),
        (["resize", "a", "0"], "a number of workers from 1, or auto"),
        (["resize", "a", "two"], "a number of workers from 1, or auto"),
        (["resize", "a", "9" * 5000], "a number of workers from 1, or auto"),
        (["resize", "a"], "Missing argument"),
        (["submit", "is-not-there.py"], "'is-not-there.py' does not exist"),
        (["submit", __file__, "--workers", "8:1"], "min:max with 1 <= min <= max"),
        (["submit", __file__, "--workers", "0"], "min:max with 1 <= min <= max"),
        (["submit", __file__, "--workers", "\u0661"], "min:max with 1 <= min <= max"),
        (["submit", __file__, "--name", "../x"], "must start with a letter"),
        (["submit", __file__, "--runtime-env-json", "{"], "must be JSON"),
        (["submit", __file__, "--runtime-env-json", "[]"], "must be a JSON object"),
        (["submit", __file__, "--runtime-env-json", '{"pip": [], "pip": []}'], "key 'pip' occurs twice"),
        (["submit", __file__, "--runtime-env-json", '{"pipp": []}'], "no field 'pipp'; did you mean 'pip'?"),
        (["submit", __file__, "--runtime-env-json", '{"working_dir": "."}'], "option of its own: --working-dir"),
        (["submit", __file__, "--runtime-env-json", 10**5 * "["], "nested too deeply"),
        (["submit", __file__, "--working-dir", "examples"], "must contain the script"),
        (["submit", __file__, "--wait", "--json"], "choose one"),
        (["simulate", "--live", "--nodes"], "Option '--nodes' requires an argument"),
        (["completion", "tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (["top", "--interval", "0"], "not in the range 0.2<=x"),
        (["top", "--interval", "nan"], "must be a number of seconds, but got 'nan'"),
        (["drain", "a", "--deadline", "inf"], "not in the range 1<=x"),
        (["allocator", "set"], "Missing argument 'POLICY'"),
        (["drain"], "give either node names or --label"),
        (["submit", __file__, "--name", ""], "must start with a letter"),
        (["branch", "a", "--factors", "x"], "must be whole numbers such as 2,4"),
        (["drain", "10.0.0.7", "--label", "rack=a"], "not both"),
        (["drain", "--label", "rack"], "must be KEY=VALUE, but got 'rack'"),
        (["drain", "a", "--deadline", "0"], "not in the range 1<=x"),
        (["allocator", "set", "frob"], "policy must be one of boa, fair_share"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_told(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output


def test_the_simulators_own_options_and_errors_come_through(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "--trace", "x", "--profiles", "y", "--cluster", "z").exit_code == 2
    shown = run("simulate", "--help")
    assert shown.exit_code == 0 and "usage: elastic-ray simulate" in shown.output and "--mtbf" in shown.output
    assert "--nodes" in run("simulate", "--live", "--help").output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0 and "_ELASTIC_RAY_COMPLETE" in result.stdout


def test_the_submitted_command_quotes_what_a_shell_would_read() -> None:
    told = Overrides(workers=(1, 8), use_gpu=True, name="n", submission="n.2")
    line = command(Path("my train.py"), ("--text", "a b; $HOME"), told)
    assert shlex.split(line) == [
        "ELASTIC_RAY_WORKERS=1:8",
        "ELASTIC_RAY_USE_GPU=1",
        "ELASTIC_RAY_NAME=n",
        "ELASTIC_RAY_SUBMISSION=n.2",
        "python",
        "my train.py",
        "--text",
        "a b; $HOME",
    ]


def test_a_fresh_name_is_one_a_job_may_have() -> None:
    from elastic_ray.driver.ray_train_config import job_name

    name = fresh_name("тест my_train!", datetime.datetime(2026, 7, 15, 9, 30, 12))
    assert job_name(name) == name and "my-train" in name and "-0715-093012-" in name
    assert job_name(fresh_name("_", datetime.datetime(2026, 7, 15)))


@click.command()
def hostile() -> None:
    raise click.ClickException("job '\x1b[2J'\nfailed \u202e")


def test_errors_with_control_characters_are_one_printable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Commands, "get_command", lambda *_: hostile)
    result = CliRunner().invoke(cli, ["jobs"])
    assert result.exit_code == 1 and result.stderr == "Error: job '\\x1b[2J' failed \\u202e\n"


def test_tables_and_json_hold_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b[31m\u202e\x9b"
    row = JobRow(job=bad, phase="script", message=bad, metrics={bad: bad})
    show_table(JOB_COLUMNS, [job_cells(row, 0.0)], empty="")
    show_json([row])
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200)
    console.print(rich_table(JOB_COLUMNS, [job_cells(row, 0.0)]))
    say(f"two\n{bad}")
    text = capsys.readouterr().out
    table, lines = text.partition("[\n")[::2]
    for each in (text, console.file.getvalue()):  # type: ignore[attr-defined]
        assert all(letter.isprintable() or letter == "\n" for letter in each), repr(each)
    assert "\\x1b[31m\\u202e\\x9b" in table and "\\u001b[31m\\u202e\\u009b" in lines


def test_the_grafana_dashboard_is_printed_for_either_prometheus() -> None:
    shown = run("metrics", "dashboard")
    assert shown.exit_code == 0 and json.loads(shown.output)["title"] == "Elastic jobs"
    honoured = run("metrics", "dashboard", "--honor-labels")
    assert (
        json.loads(honoured.output) and "exported_job" not in honoured.output and 'job=~\\"$job\\"' in honoured.output
    )


def test_a_submission_whose_ids_are_all_taken_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(*, submission: str, **_: Any) -> None:
        tried.append(submission)
        raise ray_jobs.TakenError(submission)

    monkeypatch.setattr(ray_jobs, "submit", refuse)
    monkeypatch.setattr(ray_jobs, "_listed", lambda: ())
    (script := tmp_path / "train.py").write_text("")
    result = CliRunner().invoke(cli, ["submit", "--name", "x", str(script)])
    assert result.exit_code == 1 and "choose another --name" in result.output
    assert len(set(tried)) == len(tried) == 20
