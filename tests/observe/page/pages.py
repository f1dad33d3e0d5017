"""Pages that are served for tests, and a browser that opens them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from elastic_ray.observe.page.feed import Feed
from elastic_ray.observe.page.gate import Gate
from elastic_ray.observe.page.server import PageServer, listener, serve
from elastic_ray.observe.page.source import Source

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def served(
    source: Source, token: str | None = None, feed: Feed | None = None, *, host: str = "127.0.0.1"
) -> Iterator[int]:
    """The port of a page that is served on loopback from another thread, by the rules of a page that is at ``host``."""
    bound = listener("127.0.0.1", 0)
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    server = PageServer(source, Gate(host=host, token=token), feed)
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(server, bound, over.wait)))
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(timeout=180)
        assert not thread.is_alive()
        loop.close()


@functools.cache
def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    if CHROMIUM is None:
        return "there is no Chromium on this machine (Debian: apt-get install chromium)"
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed (pip install 'elastic-ray[test]')"
    return ""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Headless Chromium, for one test module."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def tab(started: Any, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """A tab of its own, and what goes wrong in it: errors, dialogs. What is left of that at the end fails the test."""
    wrong: list[str] = []
    page = started.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.accept()))
    page.on("console", lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None)
    try:
        yield page, wrong
    finally:
        page.close()
    assert not wrong


def until(page: Any, expression: str, timeout_s: float = 180.0) -> None:
    """Wait until an expression is true; asked from outside, since the page's own policy forbids code from strings."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {expression}"
        time.sleep(0.05)


@contextlib.contextmanager
def dashboard(*arguments: str, address: str = "") -> Iterator[tuple[str, str]]:
    """``elastic-ray dashboard`` as a user starts it: the address that it prints, and the token."""
    command = [sys.executable, "-u", "-m", "elastic_ray.cli", "dashboard", "--port", "0", *arguments]
    environment = {**os.environ, **({"RAY_ADDRESS": address} if address else {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        said = ""
        while "dashboard: http" not in said or (address and "token" not in said):
            line = process.stdout.readline()
            assert line, f"it has ended: {said}"
            said += line
        found = re.search(r"dashboard: (http://127\.0\.0\.1:\d+/)", said)
        token = re.search(r"shown once: (\S+)", said)
        assert found is not None
        yield found[1], token[1] if token else ""
    finally:
        process.terminate()
        process.wait(timeout=180)
        process.stdout.close()


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=180) as answer:
        return json.loads(answer.read())
