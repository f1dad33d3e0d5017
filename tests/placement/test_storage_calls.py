"""Calls on storage that may never answer: few threads, deadlines, and what is waited for."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from placement.storage.storage_calls import StorageCalls, StorageTimeoutError, call_storage


def test_an_answer_and_an_error_come_through() -> None:
    calls = StorageCalls("disk")
    assert calls.call("adding", lambda: 1 + 1, timeout_s=60) == 2
    with pytest.raises(KeyError):
        calls.call("failing", lambda: {}["x"], timeout_s=60)
    assert asyncio.run(calls.run("adding", lambda: 3, timeout_s=60)) == 3
    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(calls.run("failing", _time_out, timeout_s=60))


def _time_out() -> None:
    raise TimeoutError("its own")


def test_a_hanging_one_is_given_up_while_others_continue() -> None:
    free, before = threading.Event(), threading.active_count()
    calls = StorageCalls("s3://bucket", threads=2)
    with pytest.raises(StorageTimeoutError, match=r"storage s3://bucket has not answered for \d+ s: writing events"):
        calls.call("writing events", free.wait, timeout_s=0.1)
    assert calls.call("reading", lambda: "read", timeout_s=60) == "read", "there is another thread"
    other = calls.start("deleting", free.wait)
    begin_s = time.monotonic()
    with pytest.raises(StorageTimeoutError):
        asyncio.run(calls.run("reading", lambda: "read", timeout_s=0.1))  # both hang
    assert time.monotonic() - begin_s < 60
    assert threading.active_count() < before + 20
    free.set()
    assert other.answer.result(60)
    assert calls.call("reading", lambda: "again", timeout_s=60) == "again"


def test_who_waits_too_long_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    begun = threading.Event()
    calls = StorageCalls("disk")
    call = calls.start("writing events", lambda: (begun.set(), free.wait()))
    assert begun.wait(60), "a call counts as heard of when it begins"
    assert calls.waiting() == ""
    call.heard_s -= 12.0
    assert calls.waiting() == "storage disk has not answered for 12 s: writing events"
    free.set()
    call.answer.result(60)
    deadline = time.monotonic() + 60
    while calls.waiting():
        assert time.monotonic() < deadline


def test_a_long_call_in_pieces_is_waited_for() -> None:
    calls = StorageCalls("disk")

    def copy(go_on: object) -> int:
        assert callable(go_on)
        for _ in range(24):
            time.sleep(0.05)  # a call that takes long, and asks whether to continue
            if not go_on():
                raise InterruptedError
        return 24

    call = calls.start_long("copying", copy)
    assert calls.wait(call, timeout_s=1.0), "1.2 s in all, but never silent for 1 s"
    assert call.answer.result() == 24
    assert asyncio.run(calls.run_long("copying", copy, timeout_s=1.0)) == 24
    call = calls.start_long("copying", copy)
    assert not calls.wait(call, timeout_s=60, until=call.answer.running)
    with pytest.raises(InterruptedError):
        call.answer.result(60)


def test_call_given_up_in_the_queue_is_never_made() -> None:
    free, made = threading.Event(), list[int]()
    calls = StorageCalls("disk", threads=1)
    hanging = calls.start("hanging", free.wait)
    with pytest.raises(StorageTimeoutError):
        calls.call("late", lambda: made.append(1), timeout_s=0.05)
    free.set()
    hanging.answer.result(60)
    calls.call("other", lambda: made.append(2), timeout_s=60)
    assert made == [2]


def test_one_call_alone() -> None:
    assert call_storage("disk", "adding", lambda: 5, timeout_s=60) == 5
