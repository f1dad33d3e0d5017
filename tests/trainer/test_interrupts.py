"""Ctrl-C while a driver waits for its job."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from elastic_ray.driver.display import Interrupts


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """Ray Tune leaves its own behind in a process where it ran."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_one_that_other_code_swallows_is_noticed() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):
            ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_program_that_handles_it_by_itself_does_so_still() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Interrupts() as interrupts:
            ctrl_c()
            interrupts.check()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
