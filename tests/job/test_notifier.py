"""The webhook of a job: what it is told, and that nothing depends on it."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import elastic_ray as er
from elastic_ray.events import JobPhase
from elastic_ray.job import shutdown
from elastic_ray.job.shutdown import Notifier
from tests.job.specs import spec


class _Mailbox(http.server.BaseHTTPRequestHandler):
    told: list[Any]
    status = 200
    silent_s = 0.0

    def do_POST(self) -> None:
        time.sleep(self.silent_s)  # as slow as the server is said to be
        self.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def mailbox() -> Iterator[tuple[type[_Mailbox], str]]:
    handler = type("Mailbox", (_Mailbox,), {"told": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}/hook/secret"
    server.shutdown()
    server.server_close()


def test_an_end_is_told_and_a_long_wait_once(mailbox: tuple[type[_Mailbox], str]) -> None:
    handler, url = mailbox
    warned: list[str] = []
    told = Notifier(spec(elastic=er.ElasticConfig(webhook=url, webhook_waits_s=60.0)), warned.append)

    async def live() -> None:
        for phase, now_s in (("waiting", 0.0), ("waiting", 59.0), ("waiting", 60.0), ("waiting", 90.0)):
            told.tick(JobPhase(phase), "2 jobs are before it", now_s)
        await told._background.finish(10.0)
        told.tick(JobPhase.RUNNING, "", 100.0)
        for now_s in (200.0, 250.0, 261.0):
            told.tick(JobPhase.WAITING, "preempted", now_s)
        await told._background.finish(10.0)
        await told.notify("failed", "ValueError: no")

    asyncio.run(live())
    assert [(each["event"], each["reason"]) for each in handler.told] == [
        ("waiting", "it has waited for 1 min: 2 jobs are before it"),
        ("waiting", "it has waited for 1 min: preempted"),
        ("failed", "ValueError: no"),
    ]
    assert handler.told[-1]["text"] == f"job {spec().job}: failed, ValueError: no" and not warned


def test_call_that_fails_is_a_warning_without_the_address(
    mailbox: tuple[type[_Mailbox], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, url = mailbox
    warned: list[str] = []

    def tell(address: str) -> str:
        asyncio.run(Notifier(spec(elastic=er.ElasticConfig(webhook=address)), warned.append).notify("finished", ""))
        return warned.pop()

    handler.status = 500
    assert tell(url).endswith("it answered 500")
    handler.silent_s = 2.0
    monkeypatch.setattr(shutdown, "_DEADLINE_S", 0.5)
    begin_s = time.monotonic()
    assert tell(url).endswith("it has not answered within 0.5 s")
    assert time.monotonic() - begin_s < 10.0
    monkeypatch.undo()
    assert "refused" in tell("http://127.0.0.1:9/hook/secret")
    for wrong in ("http://[/secret", "http://no such host/secret"):
        assert "secret" not in tell(wrong)


def test_nothing_shows_the_address() -> None:
    asked = spec(elastic=er.ElasticConfig(webhook="https://chat.example/secret"))
    assert "secret" not in repr(asked).replace("secret=", "")
    with pytest.raises(ValueError, match="webhook must be an address that begins with http") as raised:
        er.ElasticConfig(webhook="ftp://secret")
    assert "ftp://" not in str(raised.value)
