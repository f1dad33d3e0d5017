"""SHELL: a worker process watches its job's controller, which may die and come back while the process trains on.

The process asks every now and then whether it is still the controller's. A controller that Ray has restarted has it
introduce itself; without a controller that knows it, the process gives its reservation back and ends. A run whose
controller is gone for good saves itself before that, between two steps.
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
    """Registration of a process: its controller, and its worker there (empty while it is idle)."""

    controller: Any
    token: str
    worker: str = ""


class ControllerWatchdog:
    """Watchdog that asks for the controller in a thread, for as long as the process lives.

    Args:
        introduce: what to tell a controller that has lost its memory; None while no run is under way.
        give_back: releases the reservation of the run under way, before the process ends.
        save: has the run under way save itself and end, where it can; takes the reason, returns once that is done.
        timeout_s: longest time without an answer from a controller that may come back.
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
        """Watch this controller from now on; None for no controller, whose end would end this process."""
        self._heard_s = time.monotonic()
        self._registration = watch

    def _run(self) -> None:
        """Ask again and again; end the process once it belongs to no controller."""
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
                    self._save_before(why)
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

    def _save_before(self, why: str) -> None:
        try:
            self._save(why)
        except Exception:  # the process ends all the same
            logger.exception("a run without a controller could not save itself")

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
