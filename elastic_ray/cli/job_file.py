"""A job in a file, ``job.yaml``, for ``elastic-ray submit`` (pure but for reading that file)."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from elastic_ray.driver.overrides import as_field, parse_workers
from placement.errors import InputError
from placement.text import meant

SUFFIXES = (".yaml", ".yml")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Options of ``elastic-ray submit`` in a file; paths are relative to the file.

    Attributes:
        script: that makes an ``ElasticTrainer``.
        workers: (min, max); None leaves it to the script.
        gpus: train on GPUs; False leaves it to the script.
        scheduling: fields of ``SchedulingConfig``, in place of the script's.
        name: of the job; None for the script's, with the time.
        working_dir: folder that is sent to the cluster; None for the script's own.
        runtime_env: Ray's runtime environment.
        python: interpreter on the head node.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    workers: tuple[int, int] | None = None
    gpus: bool = False
    scheduling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str | None = None
    working_dir: Path | None = None
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    python: str = "python"


def read_job_file(path: Path) -> JobFile:
    """Read a job's file.

    Raises InputError: it cannot be read, or says something that is not understood; names the field and what is right.
    """
    try:
        text = path.read_text(encoding="utf-8")
        plain, as_written = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
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
    """Raise InputError for what no ``SchedulingConfig`` takes."""
    from elastic_ray.config import SchedulingConfig

    fields = [field.name for field in dataclasses.fields(SchedulingConfig) if field.name != "memory"]
    _check_names(path, given, fields)
    try:
        SchedulingConfig(**{name: as_field(value) for name, value in given.items()})
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: scheduling: {error}") from None


def _field(mapping: Any, field: str) -> Any:
    """YAML's node of a field of the outermost mapping: it has what is written, whatever type YAML takes that for."""
    return next(value for key, value in mapping.value if key.value == field)


def _argument(node: Any) -> str:
    """An argument of the script as it is written."""
    if not isinstance(node.value, str):
        raise InputError(f"line {node.start_mark.line + 1}: each of arguments must be one text or number")
    return node.value
