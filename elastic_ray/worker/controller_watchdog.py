"""SHELL: watchdog of a worker process for its job's controller, which may die and be restarted during training.

The process regularly asks the controller whether it still owns the process. A controller that Ray has restarted
requests a new registration. If the controller does not know the process, the process releases its reservation and
exits. If the controller is gone for good, the run first saves its state between steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from elastic_ray.worker.messages import ControllerAnswer, WorkerReregistration

logger = logging.getLogger(__name__)

_EVERY_S = 0.5
_ANSWER_S = 5.0
_FAREWELL_S = 3.0
_STRANGER = "its controller does not know it"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Registration of a process: its controller, and its worker id there (empty while the process is idle)."""

    controller: Any
    token: str
    worker: str = ""


class ControllerWatchdog:
    """Watchdog thread that checks the controller throughout the process's life.

    Args:
        introduce: Returns the registration for a restarted controller, or None if no run is in progress.
        introduced: Called after the controller has accepted the registration.
        give_back: Releases the reservation of the current run before the process exits.
        save: Called with the reason; makes the current run save its state and end if possible, and then returns.
        timeout_s: Longest wait for an answer from a controller that may come back [s].
    """

    def __init__(
        self,
        introduce: Callable[[], WorkerReregistration | None],
        introduced: Callable[[], None],
        give_back: Callable[[], None],
        save: Callable[[str], None],
        *,
        timeout_s: float,
    ) -> None:
        self._introduce, self._introduced, self._give_back = introduce, introduced, give_back
        self._save, self._timeout_s = save, timeout_s
        self._registration: Registration | None = None
        self._heard_s = time.monotonic()
        threading.Thread(target=self._run, name="controller-watchdog", daemon=True).start()

    def watch(self, watch: Registration | None) -> None:
        """Watch this controller instead of the previous one, if any; None stops watching."""
        self._heard_s = time.monotonic()
        self._registration = watch

    def _run(self) -> None:
        """Poll the controller, and end the process once it belongs to no controller."""
        while True:
            time.sleep(_EVERY_S)
            watch = self._registration
            if watch is None:
                continue
            try:
                why = self._ask(watch)
            except Exception:  # whatever it is, the next question may be answered
                logger.exception("a worker process could not ask its controller")
                continue
            if why and watch is self._registration:
                if why != _STRANGER:
                    try:
                        self._save(why)
                    except Exception:  # the process ends all the same
                        logger.exception("a run without a controller could not save itself")
                self._end(why)

    def _ask(self, watch: Registration) -> str:
        """Ask the controller; return why this process no longer belongs to it, or ""."""
        try:
            answer: ControllerAnswer = ray.get(
                watch.controller.greet.remote(watch.worker, watch.token), timeout=_ANSWER_S
            )
            if answer is ControllerAnswer.INTRODUCE and (told := self._introduce()) is not None:
                ray.get(watch.controller.introduce.remote(told), timeout=_ANSWER_S)
                self._introduced()
        except ActorDiedError:
            return "its controller has ended"
        except (RayError, TimeoutError) as error:  # it may be on its way back
            silence_s = time.monotonic() - self._heard_s
            if silence_s <= self._timeout_s:
                return ""
            return f"its controller has not answered for {silence_s:.0f} s ({type(error).__name__})"
        self._heard_s = time.monotonic()
        return _STRANGER if answer is ControllerAnswer.STRANGER else ""

    def _end(self, why: str) -> None:
        logger.warning("this worker process ends: %s", why)
        # In a thread of its own, for the control store may hang, and this process must end all the same.
        farewell = threading.Thread(target=self._release, name="farewell", daemon=True)
        farewell.start()
        farewell.join(_FAREWELL_S)
        os._exit(1)

    def _release(self) -> None:
        with contextlib.suppress(Exception):
            self._give_back()
