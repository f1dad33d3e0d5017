"""Overrides of a script's jobs by ``elastic-ray submit``, passed as environment variables (pure).

- ``ELASTIC_RAY_WORKERS`` (``1:8``, ``4``): replaces ``ScalingConfig(num_workers)`` in all of the script's trainers;
- ``ELASTIC_RAY_USE_GPU`` (``1``, ``0``): replaces ``ScalingConfig(use_gpu)``;
- ``ELASTIC_RAY_NAME``: name of the first job without ``RunConfig(name)``; later jobs get new names;
- ``ELASTIC_RAY_SCHEDULING`` (``{"tenant": "vision"}``): fields for every trainer's ``SchedulingConfig``;
- ``ELASTIC_RAY_COMMAND`` (JSON): arguments of ``elastic-ray submit``, stored with each run for its next cluster;
- ``ELASTIC_RAY_REPLAY`` (a number): jobs are named ``NAME-replay-NUMBER`` and end after this number of steps, for
  ``elastic-ray verify --replay``;
- ``ELASTIC_RAY_RESUME`` (``1``): Ray Tune sweeps continue from their directories, for ``elastic-ray resume --all``;
- ``ELASTIC_RAY_USER``: owner of the jobs, instead of the user of the script's process;
- ``ELASTIC_RAY_SUBMISSION``: Ray submission that the jobs belong to, so that ``elastic-ray logs`` finds their output.

They may also be set manually. Values of ``ScalingConfig`` that are replaced are logged.
"""

from __future__ import annotations

import dataclasses
import datetime
import getpass
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ray.config import SchedulingConfig

from placement.arguments import meant
from placement.unique_keys import load_json

WORKERS = "ELASTIC_RAY_WORKERS"
USE_GPU = "ELASTIC_RAY_USE_GPU"
SCHEDULING = "ELASTIC_RAY_SCHEDULING"
NAME = "ELASTIC_RAY_NAME"
SUBMISSION = "ELASTIC_RAY_SUBMISSION"
COMMAND = "ELASTIC_RAY_COMMAND"
REPLAY = "ELASTIC_RAY_REPLAY"
RESUME = "ELASTIC_RAY_RESUME"
USER = "ELASTIC_RAY_USER"

_PREFIX = "ELASTIC_RAY_"
_OTHERS = ("POOL", "TRACKER_DIR", "NNI", "NNI_HOST", "NNI_PARAMETER", "TEST_DEVICE")
_KNOWN = (
    WORKERS,
    USE_GPU,
    SCHEDULING,
    NAME,
    SUBMISSION,
    COMMAND,
    REPLAY,
    RESUME,
    USER,
    *(_PREFIX + name for name in _OTHERS),
)

_FORMAT = "%m%d-%H%M%S"
_MOST_LETTERS = 60  # of a name of at most 128
_NUMBER = re.compile("[0-9]{1,9}")
_RANGE = re.compile("([0-9]{1,9})(?::([0-9]{1,9}))?")

logger = logging.getLogger(__name__)


def parse_workers(text: str) -> tuple[int, int]:
    """Return the (min, max) in a text: ``"4"`` gives (4, 4), ``"1:8"`` gives (1, 8); ValueError if invalid."""
    match = _RANGE.fullmatch(text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(
            f"workers must be a number such as 4, or min:max with 1 <= min <= max such as 1:8: got {text!r}"
        )
    return low, high


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Settings of ``elastic-ray submit`` that override the script's own; passed as environment variables."""

    workers: tuple[int, int] | None = None  # (min, max); None leaves it to the script
    use_gpu: bool | None = None  # None leaves it to the script
    # fields of ``SchedulingConfig``, in place of the script's
    scheduling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""  # for a job that has none; empty for a fresh one
    submission: str = ""  # id of Ray's submission; empty outside of one
    user: str = ""  # owner of the jobs; empty for the user of the script's process
    command: tuple[str, ...] = ()  # arguments of ``elastic-ray submit``; empty outside of a submission
    replay: int = 0  # steps after which a replay of the script's job ends; 0 where it is none
    resume: bool = False  # whether sweeps continue from their directories

    def environment(self) -> dict[str, str]:
        """Return these overrides as environment variables, keyed by name; unset overrides are left out."""
        values = {
            WORKERS: "" if self.workers is None else ":".join(map(str, self.workers)),
            USE_GPU: "" if self.use_gpu is None else str(int(self.use_gpu)),
            SCHEDULING: json.dumps(self.scheduling) if self.scheduling else "",
            NAME: self.name,
            SUBMISSION: self.submission,
            USER: self.user,
            REPLAY: str(self.replay) if self.replay else "",
            RESUME: "1" if self.resume else "",
            COMMAND: json.dumps(self.command) if self.command else "",
        }
        return {variable: value for variable, value in values.items() if value}

    def named(self, name: str | None) -> str | None:
        """Return the job's name, with ``-replay-STEPS`` appended if the job is a replay; None if ``name`` is None."""
        return f"{name}-replay-{self.replay}" if name is not None and self.replay else name

    def scheduled(self, given: SchedulingConfig) -> SchedulingConfig:
        """Return the script's configuration with the overridden fields replaced."""
        try:
            return dataclasses.replace(given, **{name: as_field(value) for name, value in self.scheduling.items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{SCHEDULING}: {error}") from None

    def scaling(self, given: Any, default: type[Any]) -> Any:
        """Return the script's ``ScalingConfig`` ``given`` (None: ``default()``) with overridden fields replaced."""
        config = default() if given is None else given
        if not isinstance(config, default):
            return given  # its reader refuses it
        wanted: dict[str, Any] = {"num_workers": self.workers, "use_gpu": self.use_gpu}
        changes = {name: value for name, value in wanted.items() if value is not None}
        for name, variable in (("num_workers", WORKERS), ("use_gpu", USE_GPU)):
            before = getattr(config, name)
            if given is not None and name in changes and changes[name] != before:
                logger.warning(
                    "ScalingConfig(%s=%r) of the script is replaced by %r: %s is set",
                    name,
                    before,
                    changes[name],
                    variable,
                )
        return dataclasses.replace(config, **changes) if changes else given


def as_field(value: Any) -> Any:
    """Convert a JSON or YAML value to a configuration field's value: a list becomes a tuple."""
    return tuple(value) if isinstance(value, list) else value


def read_overrides(environment: Mapping[str, str]) -> Overrides:
    """Return the overrides set by environment variables. Raises ValueError naming a variable with an invalid value."""
    for unknown in sorted(name for name in environment if name.startswith(_PREFIX) and name not in _KNOWN):
        logger.warning("environment variable %s has no effect%s", unknown, meant(unknown, _KNOWN))
    workers, use_gpu = environment.get(WORKERS, ""), environment.get(USE_GPU, "")
    for name in (USE_GPU, RESUME):
        if (told := environment.get(name, "")) not in ("", "0", "1"):
            raise ValueError(f"{name} must be 0 or 1, but got {told!r}")
    try:
        limits = parse_workers(workers) if workers else None
    except ValueError as error:
        raise ValueError(f"{WORKERS}: {error}") from None
    scheduling, command = _read(environment, SCHEDULING, dict, "object"), _read(environment, COMMAND, list, "list")
    if not _NUMBER.fullmatch(replay := environment.get(REPLAY, "") or "0"):
        raise ValueError(f"{REPLAY} must be a number of steps, but got {replay!r}")
    return Overrides(
        workers=limits,
        use_gpu=bool(int(use_gpu)) if use_gpu else None,
        scheduling=scheduling,
        name=environment.get(NAME, ""),
        submission=environment.get(SUBMISSION, ""),
        user=environment.get(USER, ""),
        command=tuple(map(str, command)),
        replay=int(replay),
        resume=environment.get(RESUME) == "1",
    )


def login_name() -> str:
    """Return this process's user name, or the user ID if it has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def script_stem() -> str:
    """Return the running program's name without folder and extension; empty in notebooks and for ``python -c``."""
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    return path.parent.name if path.name == "__main__.py" else path.stem


def fresh_name(stem: str, now: datetime.datetime) -> str:
    """Return a unique name such as ``train-0715-093012-1f3a``."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem[:_MOST_LETTERS])
    return f"{letters.strip('-') or 'job'}-{now:{_FORMAT}}-{secrets.token_hex(2)}"


def pop_name(environment: MutableMapping[str, str]) -> str | None:
    """Remove the job's name from the environment and return it, so that only one job gets it; None if not set."""
    return environment.pop(NAME, "") or None


def _read(environment: Mapping[str, str], name: str, kind: type[Any], called: str) -> Any:
    """Return a variable's JSON value, empty if unset. Raises ValueError if the value is not of type ``kind``."""
    if not (text := environment.get(name)):
        return kind()
    try:
        found = load_json(text)
    except ValueError as error:
        raise ValueError(f"{name} must be JSON, but got {text!r}: {error}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{name} must be a JSON {called}, but got {text!r}")
    return found
