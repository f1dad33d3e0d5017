"""SHELL: refuses to submit a job whose run directory is in use by a job of another cluster.

Two clusters share nothing but storage, so the run's controller stores the time there. Clocks may differ: a job lives if
that time changes while the driver watches.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from elastic_ray.access import split
from elastic_ray.checkpoints.run_directory import SUBMISSION_FILE, RunStorage
from elastic_ray.errors import JobNameTakenError
from elastic_ray.record.submitted import SubmittedJob
from elastic_ray.record.writer import ALIVE_EVERY_S
from placement.storage.storage_calls import call_storage

T = TypeVar("T")

logger = logging.getLogger(__name__)

_WATCH_S = 3 * ALIVE_EVERY_S
_LONG_AGO_S = 600.0  # more than clocks of machines differ
_ANSWER_S = 2.0
_POLL_S = 1.0


def refuse_running_elsewhere(
    storage: RunStorage, ours: SubmittedJob, *, timeout_s: float, watch_s: float = _WATCH_S
) -> None:
    """Raise JobNameTakenError if another cluster's controller writes into the run's directory.

    If the directory's last job may live, this blocks for up to ``watch_s`` [s].

    Raises PermissionError if another user's files do not show whether their job has ended.
    """

    def read(what: Callable[[], T]) -> T:
        try:
            return call_storage(storage.where, "reading", what, timeout_s=timeout_s)
        except PermissionError as error:
            raise PermissionError(
                f"the run's directory {storage.where} may be in use by another user's job, whose files you may not "
                f"read: {error}. Choose another RunConfig(name) or storage_path, or ask that user"
            ) from error

    def read_alive() -> float:
        return read(storage.read_alive)

    theirs = read(lambda: _unfinished(storage))
    if theirs is None or theirs.session == ours.session or _is_gone(theirs, ours):
        return
    before_s = read_alive()
    if time.time() - max(before_s, theirs.submitted_s) > _LONG_AGO_S:
        return
    logger.warning(
        "job %s: its last run, on the cluster at %s, has not ended; watching for up to %g s if it still writes to %s",
        *(ours.job, theirs.address, watch_s, storage.where),
    )
    until_s = time.monotonic() + watch_s
    while time.monotonic() < until_s:
        time.sleep(min(_POLL_S, watch_s))
        if (now_s := read_alive()) != before_s:
            raise JobNameTakenError(_in_use(storage, theirs, now_s))


def _unfinished(storage: RunStorage) -> SubmittedJob | None:
    """Return the submission stored in a run's directory; None if it has ended, or there is none."""
    try:
        stored = SubmittedJob.from_json(storage.read_submission())
    except (FileNotFoundError, ValueError):
        return None
    return None if stored.why_not(storage.read_events()) is None else stored


def _is_gone(theirs: SubmittedJob, ours: SubmittedJob) -> bool:
    """True if the cluster of a submission has certainly ended, as seen from the machine that submitted to it."""
    if not theirs.host or theirs.host != ours.host:
        return False  # elsewhere an address may mean another machine, and a firewall may refuse
    if theirs.address == ours.address:
        return True  # a new head has its place
    if (place := split(theirs.address)) is not None:
        try:
            socket.create_connection(place, timeout=_ANSWER_S).close()
        except ConnectionRefusedError:
            return True
        except (OSError, OverflowError, UnicodeError):
            return False
    return False


def _in_use(storage: RunStorage, theirs: SubmittedJob, alive_s: float) -> str:
    return (
        f"the run's directory {storage.where} is in use by job {theirs.job!r} of another cluster, at {theirs.address}, "
        f"submitted at {_clock(theirs.submitted_s)}, last seen alive at {_clock(alive_s)}; both would delete each "
        f"other's checkpoints. Choose another RunConfig(name) or storage_path, or end that job: RAY_ADDRESS="
        f"{theirs.address} elastic-ray stop {theirs.job}. If that cluster has gone now, submit again: a job that does "
        f"not write for {_WATCH_S:g} s counts as ended, and so does one whose {SUBMISSION_FILE} you delete"
    )


def _clock(time_s: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(time_s, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # no controller wrote it
        return f"{time_s:g} s"


def this_machine() -> str:
    """Return a name of this machine until it reboots; containers may have the host names of others."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"
