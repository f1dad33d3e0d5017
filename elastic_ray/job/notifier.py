"""SHELL: webhook that is called at a job's end, and when it waits longer than its user has set."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable

from elastic_ray.background import Background
from elastic_ray.events import JobPhase
from elastic_ray.job_spec import JobSpec

logger = logging.getLogger("elastic_ray.job")

_DEADLINE_S = 10.0


class Notifier:
    """Posts the requested events as JSON to the address of ``ElasticConfig(webhook)``.

    A call that fails or takes too long is an event of kind ``warning``, and nothing else. The address may hold a
    secret: nothing shows it. A trial's end is its sweep's affair.

    Args:
        warn: takes why a call has failed.
    """

    def __init__(self, spec: JobSpec, warn: Callable[[str], None]) -> None:
        self._spec, self._warn = spec, warn
        self._url = spec.elastic.webhook if spec.trial is None else None
        self._background = Background()
        self._waiting_since: float | None = None
        self._told = False

    def tick(self, phase: JobPhase, message: str, now_s: float) -> None:
        """Report once each wait that has become too long."""
        if phase is not JobPhase.WAITING:
            self._waiting_since, self._told = None, False
            return
        self._waiting_since = now_s if self._waiting_since is None else self._waiting_since
        waited_s = now_s - self._waiting_since
        if not self._told and waited_s >= self._spec.elastic.webhook_waits_s:
            self._told = True
            self._background.start(self.tell("waiting", f"it has waited for {waited_s / 60:.0f} min: {message}"))

    async def tell(self, what: str, reason: str) -> None:
        """Call the webhook, and wait for the answer for as long as a call may take."""
        if not self._url:
            return
        job = self._spec.job
        said = {"job": job, "event": what, "reason": reason, "path": self._spec.storage_path}
        said["text"] = f"job {job}: {what}" + (f", {reason}" if reason else "")
        try:
            await asyncio.wait_for(asyncio.to_thread(_post, self._url, json.dumps(said).encode()), _DEADLINE_S)
        except Exception as error:  # whatever it is: a job does not depend on it
            self._warn(f"the webhook was not told that the job is {what}: {_without_address(error)}")


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
        answer.read(1)


def _without_address(error: Exception) -> str:
    """Describe an error in words that cannot contain the webhook's address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}"
    if isinstance(error, TimeoutError):
        return f"it has not answered within {_DEADLINE_S:g} s"
    reason = getattr(error, "reason", None)
    return str(reason) if isinstance(reason, OSError) else type(error).__name__
