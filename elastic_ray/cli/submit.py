"""``elastic-ray submit``: runs a script on the cluster."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from elastic_ray.cli.output import json_option, read_workers, say, show_json
from elastic_ray.driver.overrides import Overrides, as_field, fresh_name, login_name, parse_workers
from placement.arguments import meant
from placement.errors import InputError
from placement.unique_keys import compose_yaml, load_json, load_yaml

SUFFIXES = (".yaml", ".yml")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Options of ``elastic-ray submit`` as read from a file; relative paths start at the file's directory."""

    script: Path  # that makes an ``ElasticTrainer``
    arguments: tuple[str, ...] = ()
    workers: tuple[int, int] | None = None  # (min, max); None leaves it to the script
    gpus: bool = False  # train on GPUs; False leaves it to the script
    # fields of ``SchedulingConfig``, in place of the script's
    scheduling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str | None = None  # of the job; None for the script's, with the time
    working_dir: Path | None = None  # folder that is sent to the cluster; None for the script's own
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Ray's runtime environment
    python: str = "python"  # interpreter on the head node


def read_job_file(path: Path) -> JobFile:
    """Return the options of ``elastic-ray submit`` in a job file."""
    try:
        text = path.read_text(encoding="utf-8")
        plain, as_written = load_yaml(text), compose_yaml(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    known = [field.name for field in dataclasses.fields(JobFile)]
    if not isinstance(plain, dict) or "script" not in plain:
        raise InputError(f"{path} must be a mapping with script, such as {{script: train.py, workers: 1:8}}")
    _check_names(path, plain, known)
    said = {key: value for key, value in plain.items() if value is not None}
    for key, kind, what in (
        ("script", str, "a path"),
        ("name", str, "text"),
        ("working_dir", str, "a path"),
        ("python", str, "a path"),
        ("gpus", bool, "true or false"),
        ("runtime_env", dict, "a mapping"),
        ("scheduling", dict, "a mapping such as {tenant: vision}"),
        ("arguments", list | str, "a list, or one line as a shell takes it"),
        ("workers", int | str, "a number such as 4, or min:max such as 1:8"),
    ):
        if key in said and (not isinstance(said[key], kind) or (isinstance(said[key], bool) and kind is not bool)):
            raise InputError(f"{path}: {key} must be {what}, but got {said[key]!r}")
    if "workers" in said:
        try:
            said["workers"] = parse_workers(str(_field(as_written, "workers").value))  # YAML takes 1:8 for 68 seconds
        except ValueError as error:
            raise InputError(f"{path}: {error}") from None
    _check_env(said.get("runtime_env", {}), f"{path}: runtime_env")
    if "scheduling" in said:
        _check_scheduling(path, said["scheduling"])
    if "arguments" in said:
        written = _field(as_written, "arguments").value  # YAML takes 010 for 8 and yes for true
        said["arguments"] = tuple(shlex.split(written) if isinstance(written, str) else map(_argument, written))
    for key in ("script", "working_dir"):
        if key in said:
            said[key] = path.parent / said[key]
    found = JobFile(**said)
    if not found.script.is_file():
        raise InputError(f"{path}: script must be a file, but there is no {found.script}")
    return found


def _check_names(path: Path, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise InputError(f"{path}: there is no field {key!r}{meant(key, known)}")


def _check_scheduling(path: Path, given: Mapping[str, Any]) -> None:
    """Raise InputError for fields or values that ``SchedulingConfig`` does not accept."""
    from elastic_ray.config import SchedulingConfig

    fields = [field.name for field in dataclasses.fields(SchedulingConfig) if field.name != "memory"]
    _check_names(path, given, fields)
    try:
        SchedulingConfig(**{name: as_field(value) for name, value in given.items()})
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: scheduling: {error}") from None


def _check_env(env: Mapping[str, Any], what: str) -> None:
    """Raise InputError for fields of Ray's runtime environment that a submission would ignore."""
    from elastic_ray.driver.ray_train_config import check_env_fields  # imports Ray

    if "working_dir" in env:
        raise InputError(f"{what}: working_dir is an option of its own: --working-dir, or a job file's working_dir")
    try:
        check_env_fields(env, what)
    except ValueError as error:
        raise InputError(str(error)) from None


def _field(mapping: Any, field: str) -> Any:
    """Return the YAML node of a field of the outermost mapping, which has the text as written."""
    return next(value for key, value in mapping.value if key.value == field)


def _argument(node: Any) -> str:
    """Return an argument of the script as written in the file."""
    if not isinstance(node.value, str):
        raise InputError(f"line {node.start_mark.line + 1}: each of arguments must be one text or number")
    return node.value


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
    """Run SCRIPT, which creates an ElasticTrainer, on the cluster; pass ARGUMENTS to it after `--`.

    SCRIPT may also be a file such as job.yaml that contains the script's path and the options below; options given on
    the command line take precedence. The script runs on the head node as a submitted Ray job and keeps running after
    this command has ended.

    
        elastic-ray submit train.py --workers 1:8 --gpus -- --epochs 30
    """
    from elastic_ray.cli import submission as ray_jobs

    if wait and as_json:
        raise click.UsageError("--json prints the submission, --wait its output: choose one")
    job = _job(script, arguments, workers=workers, gpus=gpus, name=name, working_dir=working_dir, python=python)
    if env_json is not None:
        job = dataclasses.replace(job, runtime_env=read_env(env_json))
    given = {
        "--workers": None if workers is None else ":".join(map(str, workers)),
        "--working-dir": None if working_dir is None else str(working_dir.resolve()),
        "--runtime-env-json": env_json,
        "--python": python,
    }
    options = [word for option, value in given.items() if value is not None for word in (option, value)]
    options += ["--gpus"] * gpus
    again = (str(script.resolve()), "--name", str(job.name), *options, "--", *arguments)
    submission, entrypoint = _send_with_free_id(job, again)
    if as_json:
        show_json({"name": job.name, "submission": submission, "entrypoint": entrypoint})
        return
    from elastic_ray.access import session_warning

    if warning := session_warning():
        say(f"warning: {warning}", err=True)
    say(f"submitted {job.name}; follow it with: elastic-ray logs {job.name} -f")
    if wait:
        ray_jobs.stream_script(submission)


def _job(script: Path, arguments: tuple[str, ...], **options: Any) -> JobFile:
    """Return the options from a job file, or for a script alone, with given options taking precedence."""
    try:
        told = read_job_file(script) if script.suffix in SUFFIXES else JobFile(script=script)
    except InputError as error:
        raise click.UsageError(str(error)) from None
    given = {
        name: value for name, value in {"arguments": arguments, **options}.items() if value not in (None, False, ())
    }
    job: JobFile = dataclasses.replace(told, **given)
    name = check_name(job.name) if job.name is not None else fresh_name(job.script.stem, datetime.datetime.now())
    folder = (job.working_dir or job.script.parent).resolve()
    if not job.script.resolve().is_relative_to(folder):
        raise click.BadParameter(
            f"must contain the script {job.script}, but {folder} does not", param_hint="--working-dir"
        )
    return dataclasses.replace(job, name=name, working_dir=folder)


def _send_with_free_id(job: JobFile, again: tuple[str, ...]) -> tuple[str, str]:
    """Submit a job under the next unused id for its name; return the id and the shell command."""
    from elastic_ray.cli import submission as ray_jobs

    refused: list[str] = []
    while True:
        submission = ray_jobs.free_id(str(job.name), refused)
        try:
            return submission, send(job, again, submission=submission, user=login_name())
        except ray_jobs.TakenError as error:  # by one that was not there a moment ago
            refused.append(submission)
            if len(refused) == _TRIES:
                raise click.ClickException(
                    f"a submission needs a unique id, but Ray refused {', '.join(refused)} as taken: choose "
                    "another --name"
                ) from error


def send(
    job: JobFile, again: tuple[str, ...], *, submission: str, user: str, replay: int = 0, resume: bool = False
) -> str:
    """Submit a job and return the shell command that Ray runs.

    Args:
        job: Options with a name and a working directory.
        again: Command-line arguments that would submit the job again.
        replay: Number of the last step of a replay; 0 if this is not a replay.
        resume: True if the script's sweeps should continue from their directories.

    Raises TakenError if the submission id already exists, and ClickException if Ray refuses the submission.
    """
    from elastic_ray.cli import submission as ray_jobs

    assert job.name is not None and job.working_dir is not None, "made by _job"
    said = Overrides(
        workers=job.workers,
        use_gpu=True if job.gpus else None,
        scheduling=job.scheduling,
        name=job.name,
        submission=submission,
        user=user,
        command=() if replay else again,
        replay=replay,
        resume=resume,
    )
    entrypoint = command(job.script.resolve().relative_to(job.working_dir), job.arguments, said, job.python)
    ray_jobs.submit(
        submission=submission,
        name=job.name,
        entrypoint=entrypoint,
        working_dir=job.working_dir,
        runtime_env=job.runtime_env,
    )
    return entrypoint


def send_again(
    again: tuple[str, ...],
    *,
    submission: str,
    user: str,
    workers: tuple[int, int] | None = None,
    replay: int = 0,
    resume: bool = False,
) -> None:
    """Resubmit a job with the arguments stored by its earlier submission.

    Args:
        workers: Limits (min, max) to use instead of the stored ones; None keeps the stored ones.
    """
    with submit.make_context("submit", list(again)) as context:
        told = {name: value for name, value in context.params.items() if name not in ("wait", "as_json")}
    env_json = told.pop("env_json")
    job = _job(**{**told, "workers": workers or told["workers"]})
    if env_json is not None:
        job = dataclasses.replace(job, runtime_env=read_env(env_json))
    send(job, again, submission=submission, user=user, replay=replay, resume=resume)


def command(script: Path, arguments: tuple[str, ...], told: Overrides, python: str = "python") -> str:
    """Return the shell command that starts the script, with ``told`` as environment variables of its own process."""
    words = [f"{variable}={shlex.quote(value)}" for variable, value in told.environment().items()]
    return " ".join([*words, shlex.join([python, script.as_posix(), *arguments])])


def check_name(name: str) -> str:
    """Return the name if it is valid for a job, otherwise raise a usage error."""
    from elastic_ray.driver.ray_train_config import job_name  # imports Ray

    try:
        checked = job_name(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--name") from None
    if checked is None:
        raise click.BadParameter(f"must be a name of your own, but got {name!r}", param_hint="--name")
    return checked


def read_env(text: str) -> dict[str, Any]:
    """Return Ray's runtime environment, parsed from JSON text."""
    try:
        env = load_json(text)
    except ValueError as error:
        raise click.BadParameter(f"must be JSON, but {error}", param_hint="--runtime-env-json") from None
    if not isinstance(env, dict):
        raise click.BadParameter(f"must be a JSON object, but got {text}", param_hint="--runtime-env-json")
    try:
        _check_env(env, "--runtime-env-json")
    except InputError as error:
        raise click.UsageError(str(error)) from None
    return env
