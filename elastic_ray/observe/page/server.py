"""SHELL: HTTP server for the page, with assets, a snapshot, a stream of changes, job details and actions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, cast

from aiohttp import web

from elastic_ray.observe.page.feed import Client, Feed, TooManyClientsError, difference, plain, tables, to_json
from elastic_ray.observe.page.gate import HEADERS, LONGEST_WAIT_S, MOST, MOST_OF_ONE, Asked, Doors, Gate
from elastic_ray.observe.page.importance import importance
from elastic_ray.observe.page.source import LOOKS, ActionRefusedError, Source
from placement.errors import InputError

logger = logging.getLogger("elastic_ray.observe")
_ACTIONS = ("resize", "release", "pause", "resume", "stop")
_MOST_BODY = 4096
_BEAT_S = 15.0  # an empty line, by which a browser that is gone is noticed
_IDLE = 4  # a page that nobody has open looks so many times more rarely
_MOST_NAME = 512
_STALE_S = 10.0
_WRITE_S = 30.0  # a browser that takes nothing for so long is gone, or does not read
_MOST_QUESTIONS = 16
_MOST_LINES = 10  # of the log in a minute, about what is no HTTP
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


class PageServer:
    """HTTP server for one data source's web page."""

    def __init__(self, source: Source, gate: Gate, feed: Feed | None = None) -> None:
        self._source, self._gate, self._feed = source, gate, feed or Feed()
        self._assets = read_assets()
        self._tables: dict[str, Any] = {}
        self._version = 0
        self._asking = asyncio.Lock()  # the source answers one at a time
        self._guessing = asyncio.Lock()  # one simulation at a time
        self._looking = asyncio.Lock()  # at one process at a time
        self._wanted = asyncio.Event()
        self._waiting = 0  # questions of browsers
        self.doors = Doors(*_room())

    def application(self) -> web.Application:
        """Return the aiohttp application that serves the page."""
        app = web.Application(middlewares=[self._guard], client_max_size=_MOST_BODY)
        app.router.add_get("/", self._file)
        app.router.add_get("/api/snapshot", self._snapshot)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/jobs/{job:[^/]+}", self._job)
        app.router.add_get("/api/jobs/{job:[^/]+}/workers/{rank:[0-9]{1,6}}/{what}", self._process)
        app.router.add_get("/api/sweeps/{sweep:[^/]+}", self._sweep)
        app.router.add_get("/api/what-if", self._what_if)
        app.router.add_post("/api/jobs/{job:[^/]+}/{action}", self._act)
        app.router.add_get("/{name}", self._file)
        app.cleanup_ctx.append(self._watching)
        app.on_shutdown.append(self._leave)
        return app

    async def _leave(self, app: web.Application) -> None:
        """Close the feed when the server shuts down, so that no stream keeps waiting."""
        self._feed.close()

    async def _watching(self, app: web.Application) -> Any:
        """Poll the source in the background while the page is served."""
        task = asyncio.create_task(self._watch())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _watch(self) -> None:
        """Poll the source in a loop; an error is logged and sent to browsers, and polling continues."""
        while True:
            look = asyncio.ensure_future(self._refresh())
            try:
                await asyncio.wait({look}, timeout=_STALE_S)
                if not look.done():
                    self._report_problem(f"nothing has answered for {_STALE_S:g} s: what is shown is as old")
                await look
            except asyncio.CancelledError:
                look.cancel()
                raise
            except Exception:
                logger.exception("the page could not be brought up to date")
                self._report_problem("it could not be brought up to date; its own log tells why")
            period_s = self._source.period_s
            if period_s is None and self._tables:
                return
            await self._pause(period_s or 1.0)

    def _report_problem(self, problem: str) -> None:
        """Notify browsers that the data they show is out of date, and why."""
        if not self._tables or self._tables["source"]["problem"] == problem:
            return
        self._tables = {**self._tables, "source": {**self._tables["source"], "problem": problem}}
        self._version += 1
        self._feed.notify(_message("change", self._version, {"source": self._tables["source"]}))

    async def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the source, one call at a time; a call is completed even if its browser disconnects."""
        if self._waiting >= _MOST_QUESTIONS:
            raise web.HTTPServiceUnavailable(reason="too many questions wait; ask again in a moment")
        self._waiting += 1
        return await asyncio.shield(asyncio.ensure_future(self._one_at_a_time(function, arguments)))

    async def _one_at_a_time(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            async with self._asking:
                return await asyncio.to_thread(function, *arguments)
        finally:
            self._waiting -= 1

    async def _pause(self, period_s: float) -> None:
        """Wait until the next poll; while no browser has the page open, wait longer, or until a request arrives."""
        self._wanted.clear()
        await asyncio.sleep(period_s)
        if not self._feed.clients:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), (_IDLE - 1) * period_s)

    async def _refresh(self) -> None:
        """Poll the source once and send the changes to browsers."""
        async with self._asking:
            snapshot = await asyncio.to_thread(self._source.poll, time.time())
        after = await asyncio.to_thread(tables, snapshot)
        changed = difference(self._tables, after) if self._tables else after
        self._tables = after
        if not changed:
            return
        self._version += 1
        if self._feed.clients:
            self._feed.notify(_message("change", self._version, {**changed, "time_s": after["time_s"]}))

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Count the request as in progress on its connection, and answer it."""
        self.doors.start(request.transport)
        try:
            return await self._answer(request, handler)
        finally:
            self.doors.end(request.transport, time.monotonic())

    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Return the handler's response, or an error for a refused request; internal errors are not disclosed."""
        refused = self._gate.refusal(_asked(request))
        if refused is not None:
            return _error(*refused)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _error(error.status, error.reason)
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("%s failed", request.path)
            response = _error(500, "this has failed; the page's own log tells why")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        found = self._assets.get(request.match_info.get("name", INDEX))
        if found is None:
            return _error(404, "there is no such file")
        return web.Response(body=found[0], headers={"Content-Type": found[1]})

    async def _ready(self) -> Mapping[str, Any]:
        """Return the tables, polling the source first if none exist yet."""
        self._wanted.set()
        if not self._tables:
            await self._refresh()
        return self._tables

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        found = await self._ready()
        body = to_json({"version": self._version, **found})
        response = web.Response(body=body, content_type="application/json")
        response.enable_compression()
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Stream the full snapshot, then changes, until the browser disconnects or stops reading."""
        found = await self._ready()
        try:
            client = self._feed.join()
        except TooManyClientsError as error:
            return _error(503, str(error))
        client.start(_message("snapshot", self._version, found))
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        try:
            await response.prepare(request)
            await self._pass_on(client, response, request)
        finally:
            self._feed.leave(client)
        return response

    async def _pass_on(self, client: Client, response: web.StreamResponse, request: web.Request) -> None:
        """Write a client's queued messages; the connection of a dropped client is aborted, even during a write."""
        writing = asyncio.ensure_future(self._write(client, response))
        dropped = asyncio.ensure_future(client.until_dropped())
        try:
            await asyncio.wait({writing, dropped}, return_when=asyncio.FIRST_COMPLETED)
            if client.dropped and request.transport is not None:
                request.transport.abort()
        finally:
            for each in (writing, dropped):
                each.cancel()
            await asyncio.gather(writing, dropped, return_exceptions=True)

    async def _write(self, client: Client, response: web.StreamResponse) -> None:
        while (message := await client.next(_BEAT_S)) is not None:
            await asyncio.wait_for(response.write(message or b":\n\n"), _WRITE_S)

    async def _job(self, request: web.Request) -> web.StreamResponse:
        job = request.match_info["job"]
        found = await self._ask(self._source.detail, job) if len(job) <= _MOST_NAME else None
        if found is None:
            return _error(404, f"there is no job {job[:_MOST_NAME]!r}")
        return web.Response(body=to_json(plain(found)), content_type="application/json")

    async def _process(self, request: web.Request) -> web.StreamResponse:
        """Answer with a worker's output or stacks: one request at a time, since each starts a process on a node."""
        job, rank, what = (request.match_info[name] for name in ("job", "rank", "what"))
        if what not in LOOKS:
            return _error(404, f"there is no {what[:40]!r} of a worker: it must be one of {', '.join(LOOKS)}")
        if self._looking.locked():
            return _error(429, "another process is being looked at; ask again when that is done")
        try:
            async with self._looking:
                text = await asyncio.to_thread(self._source.process, job, int(rank), what)
        except ActionRefusedError as error:
            return _error(409, str(error))
        return web.Response(body=to_json({"text": text}), content_type="application/json")

    async def _sweep(self, request: web.Request) -> web.StreamResponse:
        """Answer with the importance of each parameter in a sweep; computed for one request at a time."""
        sweep = request.match_info["sweep"]
        trials = [row for row in (await self._ready())["jobs"] if row["sweep"] == sweep]
        if not trials:
            return _error(404, f"there is no sweep {sweep[:_MOST_NAME]!r}")
        async with self._guessing:
            found, why = await asyncio.to_thread(importance, trials)
        return web.Response(body=to_json({"importance": found, "why": why}), content_type="application/json")

    async def _what_if(self, request: web.Request) -> web.StreamResponse:
        """Answer with the jobs' outlook on other nodes or under another policy: one request at a time."""
        if self._guessing.locked():
            return _error(429, "another what-if is being worked out; ask again when it is done")
        nodes, policy = request.query.get("nodes", ""), request.query.get("policy", "")
        try:
            now, then = await asyncio.shield(asyncio.ensure_future(self._guess(nodes, policy)))
        except InputError as error:
            return _error(400, str(error))
        return web.Response(body=to_json({"now": plain(now), "then": plain(then)}), content_type="application/json")

    async def _guess(self, nodes: str, policy: str) -> Any:
        """Run a what-if to completion, even if the browser that requested it disconnects."""
        async with self._guessing:
            return await asyncio.to_thread(self._source.what_if, nodes, policy, time.time())

    async def _act(self, request: web.Request) -> web.StreamResponse:
        """Carry out an action on a job: resize, release, pause, resume or stop."""
        job, action = request.match_info["job"], request.match_info["action"]
        if action not in _ACTIONS:
            return _error(404, f"there is no action {action[:40]!r}: it must be one of {', '.join(_ACTIONS)}")
        try:
            body = json.loads(await asyncio.wait_for(request.text(), LONGEST_WAIT_S) or "{}")
            workers = body.get("workers") if isinstance(body, dict) else None
        except asyncio.TimeoutError:
            return _error(408, f"an action's body must come within {LONGEST_WAIT_S:g} s")
        except (ValueError, RecursionError):
            return _error(400, "an action's body must be a JSON object")
        if action == "resize" and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
            return _error(400, f"workers must be a whole number from 1, but got {str(workers)[:40]!r}")
        try:
            done = await self._ask(self._source.act, job, action, workers)
        except ActionRefusedError as error:
            return _error(409, str(error))
        logger.warning("%s of job %r was asked for by the page: %s", action, job, done)
        return web.Response(body=to_json({"done": done}), content_type="application/json")


def _asked(request: web.Request) -> Asked:
    """Return the properties of a request that the gate checks."""
    headers = request.headers
    return Asked(
        method=request.method,
        path=request.path,
        host=headers.get("Host", ""),
        origin=headers.get("Origin", ""),
        fetch_site=headers.get("Sec-Fetch-Site", ""),
        authorization=headers.get("Authorization", ""),
        content_type=headers.get("Content-Type", ""),
    )


def _error(status: int, reason: str) -> web.Response:
    return web.Response(
        status=status, body=to_json({"error": reason}), headers=HEADERS, content_type="application/json"
    )


def _message(kind: str, version: int, value: Any) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (kind.encode(), version, to_json(value))


def listener(host: str, port: int, *, or_any: bool = False) -> socket.socket:
    """Return a socket that listens at ``host``, an address of this machine.

    Args:
        or_any: True to use any free port if the given one is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(64)
    except (OSError, OverflowError) as error:
        bound.close()
        if or_any and port:
            return listener(host, 0)
        raise OSError(f"nothing can listen at {host} port {port}: {error}") from error
    return bound


async def serve(server: PageServer, bound: socket.socket, until: Callable[[], Awaitable[object]]) -> None:
    """Serve a page on the socket ``bound`` until ``until()`` returns."""
    log = logger.getChild("http")
    log.addFilter(few := _Few())
    runner = web.AppRunner(
        server.application(), access_log=None, logger=log, shutdown_timeout=1.0, handler_cancellation=True
    )
    await runner.setup()
    listening = await asyncio.get_running_loop().create_server(
        lambda: _Counted(server.doors, runner.server()),  # type: ignore[misc]
        sock=bound,
    )
    closing = asyncio.create_task(_close_late(server.doors))
    try:
        await until()
    finally:
        closing.cancel()
        listening.close()
        await runner.cleanup()
        log.removeFilter(few)


async def _close_late(doors: Doors) -> None:
    """Close connections if no request arrives on them in time."""
    while True:
        await asyncio.sleep(1.0)
        for transport in doors.late(time.monotonic()):
            cast("asyncio.Transport", transport).abort()


class _Counted(asyncio.Protocol):
    """Connection handler that registers the connection with ``doors``; the rest is aiohttp's."""

    def __init__(self, doors: Doors, inner: asyncio.Protocol) -> None:
        self._doors, self._inner = doors, inner
        self._transport: asyncio.BaseTransport | None = None
        # Called with all that comes and goes.
        self.data_received = inner.data_received  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        leaves = self._doors.open(transport, str(peer[0]) if peer else "", time.monotonic())
        self._inner.connection_made(transport)
        if leaves is not None:
            cast("asyncio.Transport", leaves).abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._doors.close(self._transport)
        self._inner.connection_lost(error)


class _Few(logging.Filter):
    """Log filter that passes only a few lines a minute, so that clients sending invalid HTTP cannot fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._minute, self._lines = 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        minute = int(time.monotonic() // 60)
        self._minute, self._lines = minute, 1 if minute != self._minute else self._lines + 1
        return self._lines <= _MOST_LINES


def _room() -> tuple[int, int]:
    """Return the maximum number of connections, in total (at most a quarter of the open-file limit) and per peer."""
    most = min(MOST, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
    return most, min(MOST_OF_ONE, most * 3 // 4)


def read_assets() -> Mapping[str, tuple[bytes, str]]:
    """Return (content, content type) for each asset, keyed by file name; only these names are ever served."""
    folder = files("elastic_ray.observe.page") / "assets"
    found = {}
    for each in folder.iterdir():
        kind = _TYPES.get(each.name[each.name.rfind(".") :])
        if kind is not None:
            found[each.name] = each.read_bytes(), kind
    return found
