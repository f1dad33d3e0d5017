"""The page's server, over real sockets, with facts of the test's own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from elastic_ray.observe.page import gate
from elastic_ray.observe.page.feed import Feed
from elastic_ray.observe.page.gate import MOST_OF_ONE
from elastic_ray.observe.page.model import JobDetail, PageJob, PageSnapshot, PageSource, Strip
from elastic_ray.observe.page.source import ActionRefusedError
from placement.errors import InputError
from tests.observe.page.pages import served

HOSTILE = "<script>alert(1)</script>/../é\u2028"
TOKEN = "a-token-of-this-test"


class Facts:
    """A source whose jobs the test sets."""

    period_s: float | None = 0.05

    def __init__(self) -> None:
        self.jobs = (PageJob(job=HOSTILE, phase="running", workers=2),)
        self.acted: list[tuple[str, str, int | None]] = []
        self.broken = False

    def poll(self, now_s: float) -> PageSnapshot:
        if self.broken:
            raise RuntimeError("secret of the inside")
        return PageSnapshot(time_s=now_s, source=PageSource(kind="live", name="test"), strip=Strip(), jobs=self.jobs)

    def detail(self, job: str) -> JobDetail | None:
        return JobDetail(job=job) if any(job == each.job for each in self.jobs) else None

    def process(self, job: str, rank: int, what: str) -> str:
        if rank:
            raise ActionRefusedError(f"job {job!r} has no worker of rank {rank} now")
        return f"{what} of {job}"

    def what_if(self, nodes: str, policy: str, now_s: float) -> Any:
        raise InputError(f"nodes must look like T4:4x8, but got {nodes!r}")

    def act(self, job: str, action: str, workers: int | None) -> str:
        if job != HOSTILE:
            raise ActionRefusedError(f"there is no job {job!r}")
        self.acted.append((job, action, workers))
        return "done"


@dataclasses.dataclass
class Page:
    """A page that is served from another thread."""

    facts: Facts
    feed: Feed
    port: int

    def ask(self, path: str, *, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Status, headers and body."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def stream(self) -> socket.socket:
        """A browser's connection to the stream, whose answer has not been read."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # else the system reads megabytes for it
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode())
        return connection


@pytest.fixture
def page() -> Iterator[Page]:
    facts, feed = Facts(), Feed(most_clients=3, most_waiting=8)
    with served(facts, TOKEN, feed) as port:
        yield Page(facts, feed, port)


def messages(connection: socket.socket) -> Iterator[tuple[str, Any]]:
    """(event, data) as they come."""
    stream = connection.makefile("rb")
    event = ""
    for line in stream:
        if line.startswith(b"event: "):
            event = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield event, json.loads(line[6:])


def wait_for(condition: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_snapshot_has_promised_tables_and_every_answer_its_headers(page: Page) -> None:
    status, headers, body = page.ask("/api/snapshot")
    found = json.loads(body)
    assert status == 200 and {"jobs", "nodes", "decisions"} <= found.keys() and found["jobs"][0]["job"] == HOSTILE
    for path in ("/", "/app.js", "/style.css", "/api/snapshot", "/nowhere", "/api/jobs/none"):
        status, headers, body = page.ask(path)
        assert "script-src 'self'" in headers["Content-Security-Policy"], path
        assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers
    assert page.ask("/")[1]["Content-Type"].startswith("text/html") and b"app.js" in page.ask("/")[2]


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e%2fserver.py", "/..%2f..%2fserver.py", "//etc/passwd", "/server.py", "/api/"]
)
def test_no_path_leads_out_of_the_page(page: Page, path: str) -> None:
    assert page.ask(path)[0] == 404


def test_other_hosts_and_other_sites_are_refused(page: Page) -> None:
    for path in ("/", "/api/snapshot", "/api/events"):
        assert page.ask(path, Host="evil.example.org")[0] == 403
        assert page.ask(path, Origin="http://evil.example.org")[0] == 403
        assert page.ask(path, Sec_Fetch_Site="cross-site")[0] == 403


def test_connections_that_send_nothing_whole_take_nobody_s_place(page: Page) -> None:
    """As of another account on this machine: 260 halves of a request, more than one peer may have."""
    with contextlib.ExitStack() as held, contextlib.closing(page.stream()) as watching:
        stream = messages(watching)
        assert next(stream)[0] == "snapshot"
        for _ in range(260):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=60))
            with contextlib.suppress(OSError):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        for _ in range(5):
            assert page.ask("/api/snapshot")[0] == 200
        here = [each for each in psutil.Process().net_connections() if each.laddr and each.laddr.port == page.port]
        assert len([each for each in here if each.status == psutil.CONN_ESTABLISHED]) <= MOST_OF_ONE
        page.facts.jobs = (*page.facts.jobs, PageJob(job="new", phase="waiting"))
        assert next(stream)[0] == "change", "who is being answered stays"


def test_half_a_request_has_its_time(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LONGEST_WAIT_S", 0.5)
    with socket.create_connection(("127.0.0.1", page.port), timeout=60) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b""


def test_what_is_no_http_does_not_fill_the_log(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", page.port), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/9.9 x\r\nA\x00: \r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1000)
    assert 0 < len([each for each in caplog.records if each.name.startswith("elastic_ray.observe")]) <= 20


def test_change_is_streamed_within_second_and_nothing_but_change(page: Page) -> None:
    with contextlib.closing(page.stream()) as connection:
        stream = messages(connection)
        assert next(stream)[0] == "snapshot"
        page.facts.jobs = (*page.facts.jobs, PageJob(job="new", phase="waiting"))
        begun = time.monotonic()
        event, change = next(stream)
        assert event == "change" and [row["job"] for row in change["jobs"]["set"]] == ["new"]
        assert time.monotonic() - begun < 10.0 and set(change) == {"jobs", "time_s"}


def test_browser_that_does_not_read_is_cut_off_alone(page: Page) -> None:
    slow, fast = page.stream(), page.stream()
    wait_for(lambda: page.feed.clients == 2)
    seen = messages(fast)
    for n in range(400):  # each larger than what sockets and transports buffer together
        page.facts.jobs = (PageJob(job="big", phase="running", step=n, why="x" * 2_000_000),)
        next(seen)
        if page.feed.clients == 1:
            break
    assert page.feed.clients == 1, "the one that does not read is still served"
    page.facts.jobs = (PageJob(job="last", phase="running"),)
    while (change := next(seen)[1]) and change.get("jobs", {}).get("set", [{}])[0].get("job") != "last":
        pass
    fast.shutdown(socket.SHUT_RDWR)
    slow.close()
    wait_for(lambda: page.feed.clients == 0)


def test_no_more_browsers_than_are_served(page: Page) -> None:
    connections = [page.stream() for _ in range(3)]
    wait_for(lambda: page.feed.clients == 3)
    status, _, body = page.ask("/api/events")
    assert status == 503 and b"browsers have this page open already" in body
    for each in connections:
        each.close()


def test_actions_want_the_token_and_sound_arguments(page: Page) -> None:
    job = urllib.parse.quote(HOSTILE, safe="")
    assert page.ask(f"/api/jobs/{job}/stop", body={})[0] == 401
    assert page.ask(f"/api/jobs/{job}/resize", body={"workers": 2}, Authorization="Bearer x")[0] == 401
    assert page.facts.acted == []
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert page.ask(f"/api/jobs/{job}/resize", body={"workers": 2}, **bearer)[0] == 200
    assert page.facts.acted == [(HOSTILE, "resize", 2)]
    for workers in (None, 0, -1, True, "2", 1.5, [], {}):
        assert page.ask(f"/api/jobs/{job}/resize", body={"workers": workers}, **bearer)[0] == 400
    assert page.ask(f"/api/jobs/{job}/resize", body=[1], **bearer)[0] == 400
    assert page.ask(f"/api/jobs/{job}/explode", body={}, **bearer)[0] == 404
    assert page.ask("/api/jobs/none/stop", body={}, **bearer)[0] == 409
    assert page.ask(f"/api/jobs/{job}/stop", body={"x": "y" * 10_000}, **bearer)[0] == 413
    assert page.ask(f"/api/jobs/{job}/stop", body={}, **{**bearer, "Content_Type": "text/plain"})[0] == 415
    assert len(page.facts.acted) == 1


def test_job_is_found_by_a_hostile_name_without_leaks(page: Page) -> None:
    status, _, body = page.ask(f"/api/jobs/{urllib.parse.quote(HOSTILE, safe='')}")
    assert status == 200 and json.loads(body)["job"] == HOSTILE
    assert page.ask("/api/jobs/none")[0] == 404 and page.ask("/api/jobs/" + "x" * 5000)[0] == 404
    status, headers, body = page.ask("/api/what-if?nodes=%3Cscript%3E")
    assert (
        status == 400
        and headers["Content-Type"].startswith("application/json")
        and "<script>" in json.loads(body)["error"]
    )
    before = page.ask("/api/snapshot")[2]
    page.facts.broken = True
    time.sleep(0.2)  # longer than an answer is kept
    assert page.ask("/api/snapshot")[0] == 200 and json.loads(before)["jobs"]  # the last facts stay
    page.facts.broken = False


def test_a_process_is_looked_at_by_rank(page: Page) -> None:
    job = urllib.parse.quote(HOSTILE, safe="")
    status, _, body = page.ask(f"/api/jobs/{job}/workers/0/stack")
    assert (status, json.loads(body)) == (200, {"text": f"stack of {HOSTILE}"})
    status, _, body = page.ask(f"/api/jobs/{job}/workers/7/logs")
    assert status == 409 and b"has no worker of rank 7 now" in body
    status, _, body = page.ask(f"/api/jobs/{job}/workers/0/memory")
    assert status == 404 and b"must be one of logs, stack" in body
    assert page.ask(f"/api/jobs/{job}/workers/-1/logs")[0] == 404
    assert page.ask(f"/api/jobs/{job}/workers/0/logs", Origin="http://elsewhere")[0] == 403


def test_a_failing_look_is_told_and_taken_back(page: Page) -> None:
    with contextlib.closing(page.stream()) as connection:
        told = messages(connection)
        assert next(told)[0] == "snapshot"
        page.facts.broken = True
        kind, change = next(told)
        assert kind == "change" and "could not be brought up to date" in change["source"]["problem"]
        assert "secret" not in json.dumps(change)
        page.facts.broken = False
        assert next(told)[1]["source"]["problem"] == ""


def test_questions_of_leaving_browsers_are_asked_one_by_one(page: Page) -> None:
    inside, most = 0, 0

    def slow(job: str) -> JobDetail | None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.1)  # the others come meanwhile
        inside -= 1
        return None

    page.facts.detail = slow
    for _ in range(12):
        with contextlib.closing(socket.create_connection(("127.0.0.1", page.port))) as connection:
            connection.sendall(f"GET /api/jobs/x HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n\r\n".encode())
            time.sleep(0.02)  # its request is read
    wait_for(lambda: inside == 0)
    assert most == 1


def test_a_snapshot_larger_than_the_queue_is_sent_still() -> None:
    facts = Facts()
    facts.jobs = tuple(PageJob(job=f"job-{n}", phase="running", why="x" * 400) for n in range(300))
    with (
        served(facts, None, Feed(most_bytes=50_000)) as port,
        contextlib.closing(Page(facts, Feed(), port).stream()) as connection,
    ):
        kind, whole = next(messages(connection))
        assert kind == "snapshot" and len(whole["jobs"]) == 300


@pytest.mark.parametrize("name", ["{curly}", "a/b", "%2e%2e"])
def test_a_job_of_any_name_is_found(page: Page, name: str) -> None:
    page.facts.jobs = (PageJob(job=name, phase="running"),)
    status, _, body = page.ask(f"/api/jobs/{urllib.parse.quote(name, safe='')}")
    assert status == 200 and json.loads(body)["job"] == name
