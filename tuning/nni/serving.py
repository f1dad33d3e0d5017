"""SHELL: elastic jobs for an NNI experiment's trials, one thread each, in the experiment's process.

Each trial's command (``tuning.nni.trial``) connects to this process and waits. The trial runs for as long as the
connection exists; NNI ends a trial by killing its command. The job's reports reach NNI's manager through the channel
that NNI gives every trial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import posixpath
import select
import shutil
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.fs

from elastic_ray.worker.train_loop import pack
from placement.storage.private_files import make_directory
from placement.text import printable
from tuning.nni.loop import TrialLoop
from tuning.nni.results import Outcome
from tuning.nni.wire import FINAL, TrialId, metric_message, shown
from tuning.trial_job import Template, TrialJob

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # how late a killed command is noticed
_HTTP_TIMEOUT_S = 20.0
_NO_ANSWER_YET = 408


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentContext:
    """Context shared by an experiment's trials: names, paths and the file system."""

    experiment: str  # NNI's id of it
    sweep: str  # name of the sweep that its trials are
    path: str  # directory of the trials' events and checkpoints
    knowledge_path: str  # directory under which what trials measure is kept, for other experiments too
    filesystem: pyarrow.fs.FileSystem  # file system that both are on
    reachable: Callable[[], bool]  # whether the Ray cluster answers


class ManagerChannel:
    """HTTP channel from one trial to NNI's manager."""

    def __init__(self, url: str) -> None:
        self._url = url

    def parameter(self) -> Mapping[str, Any]:
        """Wait for the tuner's record for this trial (id and parameters), and return it."""
        self._call("PUT", {"type": "request_parameter"})
        while not (answer := self._call("GET")):
            pass
        record: Mapping[str, Any] = json.loads(json.loads(answer)["parameter"])
        return record

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to NNI's manager."""
        self._call("PUT", message)

    def _call(self, method: str, data: Mapping[str, Any] | None = None) -> bytes:
        """Return the body of the manager's answer; empty if there is none yet."""
        body = None if data is None else json.dumps(data).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            if error.code == _NO_ANSWER_YET:
                return b""
            raise


class TrialServer:
    """Server that runs the jobs of an NNI experiment's trials; each trial's command connects to it."""

    def __init__(self, template: Template, metric: str, context: ExperimentContext) -> None:
        self._template, self._metric, self._context = template, metric, context
        self._lock = threading.Lock()
        self._outcomes: dict[str, Outcome] = {}
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._folder = tempfile.mkdtemp(prefix="er-nni-")  # only this user may enter it
        self.address = os.path.join(self._folder, "trials")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._open = True
        threading.Thread(target=self._accept, name="nni-trials", daemon=True).start()

    def outcomes(self) -> dict[str, Outcome]:
        """Return each trial's outcome so far, keyed by NNI's trial id; only NNI's manager knows ``status``."""
        with self._lock:
            return dict(self._outcomes)

    def close(self, wait_s: float) -> None:
        """End all running trials and wait for their jobs to release resources."""
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections, threads = tuple(self._connections), tuple(self._threads)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + wait_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        """Serve each connecting command in its own thread, until the listener is closed."""
        while self._open:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="nni-trial", daemon=True)
            with self._lock:
                self._connections.add(connection)
                self._threads = [each for each in self._threads if each.is_alive()]
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Run one command's trial, then send (exit status, message); for a failure, the message is its error."""
        told: dict[str, str] = {}
        try:
            told = json.loads(connection.makefile().readline())
            message = self._run(connection, told)
        except Exception as error:
            if not _gone(connection):
                logger.warning("trial %s failed: %s", printable(str(told.get("trial"))), printable(str(error)))
            message = f"{type(error).__name__}: {error}"
        if told and message:
            self._record(told["trial"], error=message)
        answer = json.dumps([1 if message else 0, message]).encode() + b"\n"
        with contextlib.suppress(OSError):
            connection.sendall(answer)
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _run(self, connection: socket.socket, told: Mapping[str, str]) -> str:
        """Run one trial until it ends or its command is gone; return the reason for a failure, or ""."""
        channel = ManagerChannel(told["channel"])
        record = channel.parameter()
        sequence = int(told["sequence"])
        trial = TrialId(experiment=self._context.experiment, trial=told["trial"], sequence=sequence, parameter=record)
        parameters = record["parameters"]
        self._record(trial.trial, sequence=sequence, parameters=parameters)
        while not self._context.reachable():
            if _gone(connection):
                return ""
            time.sleep(_LOOK_S)
        job = self._start(trial, parameters)
        try:
            return self._forward_reports(connection, channel, trial, job)
        finally:
            job.stop()

    def _start(self, trial: TrialId, parameters: Any) -> TrialJob:
        """Start the trial's job in its own directory; raise TypeError if the parameters are not a mapping."""
        if not isinstance(parameters, Mapping):
            raise TypeError(f"a tuner must choose a mapping of names to values, but chose {parameters!r}")
        directory = posixpath.join(self._context.path, trial.trial)
        make_directory(self._context.filesystem, directory, private=self._template.spec.elastic.private_files)
        self._record(trial.trial, path=directory)
        loop = TrialLoop(self._template.spec.train_loop, trial)
        spec = dataclasses.replace(self._template.spec, train_loop=pack(loop, {}))
        return TrialJob(
            dataclasses.replace(self._template, spec=spec),
            sweep=self._context.sweep,
            trial=trial.trial,
            config=parameters,
            directory=directory,
            filesystem=self._context.filesystem,
            knowledge_path=self._context.knowledge_path,
        )

    def _forward_reports(
        self, connection: socket.socket, channel: ManagerChannel, trial: TrialId, job: TrialJob
    ) -> str:
        """Forward the job's reports to NNI until the trial ends; return the reason for a failure, or ""."""
        values: list[float] = []
        workers: list[int] = []
        last: Mapping[str, Any] = {}
        told_final = False
        while not _gone(connection):
            try:
                report = job.next_report(_LOOK_S)
            except TimeoutError:  # a busy machine, or a cluster that is gone: the experiment watches over that
                continue
            if report is None:
                if job.done:
                    break
                continue
            last, final = shown(report.metrics, self._metric), bool(report.metrics.get(FINAL))
            channel.send(metric_message(trial, final=final, index=len(values), value=last))
            told_final = told_final or final
            if not final:
                values.append(last["default"])
                workers.append(report.workers)
            self._record(trial.trial, value=last["default"], reports=tuple(values), workers=tuple(workers))
        else:
            return ""
        job.raise_error()
        if not last:
            return (
                f"the train loop has ended without a report: call elastic_ray.report({{{self._metric!r}: ...}}) or "
                "nni.report_intermediate_result(...), once an epoch for instance"
            )
        if not told_final:
            channel.send(metric_message(trial, final=True, index=0, value=last))
        return ""

    def _record(self, trial: str, **values: Any) -> None:
        with self._lock:
            known = self._outcomes.get(trial) or Outcome(trial=trial, sequence=-1, status="UNKNOWN")
            self._outcomes[trial] = dataclasses.replace(known, **values)


def _gone(connection: socket.socket) -> bool:
    """True if the command has closed its end of the connection. It sends nothing after its first line."""
    try:
        readable, _, _ = select.select([connection], [], [], 0.0)
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True
