"""``elastic-ray submit``."""

from __future__ import annotations

import datetime
import json
import shlex
from pathlib import Path
from typing import Any

import click

from elastic_ray.cli.job_file import SUFFIXES, JobFile, read_job_file
from elastic_ray.cli.output import json_option, read_workers, say, show_json
from elastic_ray.driver.overrides import Overrides, fresh_name, login_name
from placement.errors import InputError

_TRIES = 20


@click.command(short_help="Run a script on the cluster.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--workers",
    callback=read_workers,
    metavar="[MIN:]MAX",
    help="Number of workers, in place of what the script's trainers say.",
)
@click.option("--gpus", is_flag=True, help="Train on GPUs, in place of what the script's trainers say.")
@click.option("--name", help="Name of the job, if the script names none; by default the script's, with the time.")
@click.option(
    "--working-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder that is sent to the cluster, the script in it; by default the script's own.",
)
@click.option("--runtime-env-json", "env_json", help="Ray's runtime environment: pip, env_vars...")
@click.option("--python", help="Interpreter on the head node; by default python.")
@click.option("--wait", "-w", is_flag=True, help="Show the script's output to its end; exit code 1 if it fails.")
@json_option
def submit(
    script: Path,
    arguments: tuple[str, ...],
    workers: tuple[int, int] | None,
    gpus: bool,
    name: str | None,
    working_dir: Path | None,
    env_json: str | None,
    python: str | None,
    wait: bool,
    as_json: bool,
) -> None:
    """Run SCRIPT, which makes an ElasticTrainer, on the cluster; give it ARGUMENTS after `--`.

    SCRIPT may also be a file such as job.yaml that names the script and says what the options would; options
    that are given here outrank it. The script runs on the head node as one of Ray's submitted jobs, and continues when
    this command has ended.

    \b
        elastic-ray submit train.py --workers 1:8 --gpus -- --epochs 30
    """
    from elastic_ray.access import session_warning
    from elastic_ray.cli import submission as ray_jobs

    if wait and as_json:
        raise click.UsageError("--json prints the submission, --wait its output: choose one")
    told = _from_file(script) if script.suffix in SUFFIXES else JobFile(script=script)
    script, arguments, workers = told.script, arguments or told.arguments, workers or told.workers
    gpus, name, working_dir = gpus or told.gpus, name or told.name, working_dir or told.working_dir
    name = check_name(name) if name is not None else fresh_name(script.stem, datetime.datetime.now())
    folder = (working_dir or script.parent).resolve()
    env = told.runtime_env if env_json is None else read_env(env_json)
    if not script.resolve().is_relative_to(folder):
        raise click.BadParameter(f"must hold the script {script}, but {folder} does not", param_hint="--working-dir")
    refused: list[str] = []
    while True:
        submission = ray_jobs.free_id(name, refused)
        use_gpu, user = True if gpus else None, login_name()
        said = Overrides(
            workers=workers, use_gpu=use_gpu, scheduling=told.scheduling, name=name, submission=submission, user=user
        )
        entrypoint = command(script.resolve().relative_to(folder), arguments, said, python or told.python)
        try:
            ray_jobs.submit(
                submission=submission, name=name, entrypoint=entrypoint, working_dir=folder, runtime_env=env
            )
            break
        except ray_jobs.TakenError as error:  # by one that was not there a moment ago
            refused.append(submission)
            if len(refused) == _TRIES:
                raise click.ClickException(
                    f"a submission must have an id of its own, but Ray refused {', '.join(refused)} as taken: choose "
                    "another --name"
                ) from error
    if as_json:
        show_json({"name": name, "submission": submission, "entrypoint": entrypoint})
        return
    if warning := session_warning():
        say(f"warning: {warning}", err=True)
    say(f"submitted {name}; follow it with: elastic-ray logs {name} -f")
    if wait:
        from elastic_ray.cli.jobs import follow_script

        follow_script(submission)


def _from_file(path: Path) -> JobFile:
    try:
        return read_job_file(path)
    except InputError as error:
        raise click.UsageError(str(error)) from None


def command(script: Path, arguments: tuple[str, ...], told: Overrides, python: str = "python") -> str:
    """The shell command that Ray runs; the variables reach the script's process only, not what it starts on Ray."""
    words = [f"{variable}={shlex.quote(value)}" for variable, value in told.environment().items()]
    return " ".join([*words, shlex.join([python, script.as_posix(), *arguments])])


def check_name(name: str) -> str:
    """The name, if a job may have it."""
    from elastic_ray.driver.ray_train_config import job_name  # imports Ray

    try:
        checked = job_name(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--name") from None
    if checked is None:
        raise click.BadParameter(f"must be a name of your own, but got {name!r}", param_hint="--name")
    return checked


def read_env(text: str) -> dict[str, Any]:
    """A runtime environment."""
    try:
        env = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"must be JSON, but {error}", param_hint="--runtime-env-json") from None
    if not isinstance(env, dict):
        raise click.BadParameter(f"must be a JSON object, but got {text}", param_hint="--runtime-env-json")
    return env
