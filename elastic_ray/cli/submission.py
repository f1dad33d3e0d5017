"""SHELL: scripts that Ray runs on the cluster as submitted jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from elastic_ray.access import HOW_TO_SEND
from elastic_ray.cli.cluster import RefusedError, connect
from elastic_ray.cli.listings import Submission
from elastic_ray.cli.output import say
from placement.text import ago, one_line

_NAME = "elastic_ray"
"""Metadata of the submissions that are ours: the name."""

_POLL_S = 0.5
_SILENT_S, _REMIND_S = 3.0, 30.0  # before the first word on what a script waits for, and between two
_AGENT_S = 15.0  # a cluster that has just started has no agent yet that could run a script
_NO_AGENT = "No available agent"
_TAKEN = "already exists"


def client() -> Any:
    """Return a client of the dashboard at RAY_API_SERVER_ADDRESS, else RAY_ADDRESS, else on this machine."""
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
    if not address.startswith(("http://", "https://")):
        connect()  # says it better if there is no cluster at all
    for parent in JobSubmissionClient.__mro__:  # its modules set themselves to INFO, and tell of every upload
        logging.getLogger(parent.__module__).setLevel(logging.WARNING)
    try:
        return JobSubmissionClient(address or None)
    except AuthenticationError as error:
        where = f"the dashboard at {address}" if address else "this cluster's dashboard"
        raise RefusedError(f"{where} refuses the token of this process, or wants one: {HOW_TO_SEND}") from error
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise click.ClickException(
            f"this cluster's dashboard does not answer, and scripts are submitted through it: {_line(error)}; start "
            "Ray with its dashboard (`ray start --head`, ray[default] installed), or run the script as a driver"
        ) from error


class TakenError(Exception):
    """Error raised if a submission with this id already exists."""


def free_id(name: str, refused: Sequence[str] = ()) -> str:
    """Return an id for a submission called ``name`` that is not in use in Ray and not in ``refused``."""
    return next_id(name, [*(str(each.submission_id or "") for each in _listed()), *refused])


def next_id(name: str, taken: Sequence[str]) -> str:
    """Return ``name`` if it is unused, else ``name`` with a number higher than any in ``taken``; gaps are not filled.

    >>> next_id("bert", ["bert", "bert.4", "bert.x", "albert.9"])
    'bert.5'
    """
    numbers = [1 for each in taken if each == name]
    numbers += [int(each) for one in taken if (each := one.removeprefix(f"{name}.")) != one and each.isdecimal()]
    return f"{name}.{max(numbers) + 1}" if numbers else name


def submit(*, submission: str, name: str, entrypoint: str, working_dir: Path, runtime_env: Mapping[str, Any]) -> None:
    """Submit a command that Ray runs on the cluster."""
    there = client()
    deadline = time.monotonic() + _AGENT_S
    while True:
        try:
            there.submit_job(
                entrypoint=entrypoint,
                submission_id=submission,
                runtime_env={**runtime_env, "working_dir": str(working_dir)},
                metadata={_NAME: name},
            )
            return
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            if _TAKEN in str(error):
                raise TakenError(submission) from error
            if _NO_AGENT not in str(error) or time.monotonic() > deadline:
                raise click.ClickException(
                    f"Ray did not accept the submission {submission!r}: {_line(error)}"
                ) from error
        time.sleep(_POLL_S)


def submissions() -> tuple[Submission, ...]:
    """Return the submissions made by ``elastic-ray``, running or ended; empty if no dashboard answers."""
    return tuple(_read(each) for each in _listed() if _NAME in (each.metadata or {}))


def _listed() -> Sequence[Any]:
    """Return all jobs that Ray's dashboard lists; empty if no dashboard answers."""
    try:
        listed: Sequence[Any] = client().list_jobs()
    except RefusedError:
        raise
    except (click.ClickException, RuntimeError, OSError):
        return ()
    return listed


def find(name: str) -> Submission | None:
    """Return the latest submission with this name or id; None if none exists, or no dashboard answers."""
    same = [each for each in submissions() if name in (each.submission, each.name)]
    return max(same, key=lambda each: each.started_s or 0.0, default=None)


def stop(submission: str) -> None:
    """Stop a submission's script."""
    try:
        client().stop_job(submission)
    except (RuntimeError, OSError) as error:
        raise click.ClickException(f"Ray did not stop the submission {submission!r}: {_line(error)}") from error


def output(submission: str) -> str:
    """Return everything that a script has printed so far."""
    try:
        text: str = client().get_job_logs(submission)
    except (RuntimeError, OSError) as error:
        raise click.ClickException(f"the output of {submission!r} cannot be read: {_line(error)}") from error
    return text


def follow(submission: str, show: Callable[[str], None]) -> None:
    """Pass a script's output to ``show`` as it is printed, from start to end."""
    there = client()

    async def read() -> None:
        async for chunk in there.tail_job_logs(submission):
            show(chunk)

    with _connected():
        _await_start(there, submission)
        asyncio.run(read())


def _await_start(there: Any, submission: str) -> None:
    """Wait until a script starts; say on standard error what it is waiting for, as pip may take minutes."""
    began_s = time.monotonic()
    due_s = began_s + _SILENT_S
    while (found := _read(there.get_job_info(submission))).status == "PENDING":
        if (now_s := time.monotonic()) > due_s:
            say(f"submission {submission}, {ago(now_s - began_s)}: {found.message}", err=True)
            due_s = now_s + _REMIND_S
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Raise ClickException if the dashboard does not answer within this context."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise click.ClickException(f"the connection to the dashboard was lost: {_line(error)}") from error


def stream_script(submission: str) -> None:
    """Print a script's output until it ends. Raises Exit with code 1 if the script fails."""
    follow(submission, lambda chunk: click.echo(chunk, nl=False))
    ended = wait(submission)
    if ended.status != "SUCCEEDED":
        say(f"submission {submission}: {ended.phase}. {ended.message}".rstrip(), err=True)
        raise click.exceptions.Exit(1)


def wait(submission: str) -> Submission:
    """Wait until a submission's script has ended and return the submission."""
    there = client()
    with _connected():
        while not (found := _read(there.get_job_info(submission))).ended:
            time.sleep(_POLL_S)
    return found


def _read(details: Any) -> Submission:
    """Convert Ray's details of a submission."""
    return Submission(
        submission=str(details.submission_id or details.job_id),
        name=str((details.metadata or {}).get(_NAME, "")),
        status=str(getattr(details.status, "value", details.status)),
        message=without_trace(str(details.message or "")),
        entrypoint=str(details.entrypoint or ""),
        started_s=details.start_time / 1000.0 if details.start_time else None,
        ended_s=details.end_time / 1000.0 if details.end_time else None,
    )


def without_trace(message: str) -> str:
    """Return a message of Ray's on one line: with a traceback in it, only what is before that, and its last line.

    >>> without_trace("setup failed:\\nTraceback (most recent call last):\\n ...\\nERROR: no such package")
    'setup failed: ERROR: no such package'
    """
    before, trace, after = message.partition("Traceback (most recent call last)")
    words = [*before.split(), *(after.strip().splitlines() or [""])[-1].split()] if trace else message.split()
    return " ".join(words)


def _line(error: BaseException) -> str:
    """Return Ray's reason in one line, without the server's traceback."""
    return type(error).__name__ if isinstance(error, requests.RequestException) else one_line(error)
