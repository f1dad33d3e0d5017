"""SHELL: NNI's manager process: its configuration, start (reachable from this machine only), queries and stop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuning.nni.algorithms import KNOWN, Algorithm
from tuning.nni.wire import ADDRESS

HOSTS = ("127.0.0.1", "0.0.0.0")
_START_TIMEOUT_S = 60
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
_THREAD_FAILED = b"ERROR (nni.runtime.msg_dispatcher_base/"
_PACKAGE = Path(__file__).resolve().parents[2]  # a trial's command need not run where this is found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentState:
    """State of an experiment as reported by NNI's manager."""

    status: str  # of the experiment, in NNI's words
    trials: Mapping[str, Mapping[str, Any]]  # NNI's record of every trial, by its id
    errors: str  # what the manager has to say about an experiment that is in "ERROR"


class Manager:
    """Process of NNI's manager, which serves one experiment, its web page and its tuner; started by :meth:`start`."""

    def __init__(self, host: str, tuner: Algorithm, assessor: Algorithm | None, settings: Mapping[str, Any]) -> None:
        self._host = host
        self._read = 0  # of the tuner's log
        self._failed = False
        self.nni = _configured(tuner, assessor, settings)

    @property
    def url(self) -> str:
        """Address of NNI's web page; empty while the manager is not running."""
        return f"http://127.0.0.1:{self.nni.port}" if self.running else ""

    @property
    def running(self) -> bool:
        """True if the manager has been started and not stopped."""
        return self.nni.port is not None

    @property
    def alive(self) -> bool:
        """True if the manager's process exists."""
        process = self.nni._proc
        return process is not None and process.poll() is None

    def tuner_works(self) -> bool:
        """True if the tuner's process exists and none of its threads has failed; NNI itself may miss such failures."""
        import psutil

        with contextlib.suppress(OSError), open(self.folder / "log" / "dispatcher.log", "rb") as log:
            log.seek(self._read)
            new = log.read()
            self._read += len(new)
            self._failed = self._failed or _THREAD_FAILED in new
        try:
            children = psutil.Process(self.nni._proc.pid).children()
            return not self._failed and any("-m nni --exp_params" in " ".join(each.cmdline()) for each in children)
        except psutil.Error:  # something ended while it was looked at
            return not self._failed

    @property
    def folder(self) -> Path:
        """NNI's directory for the experiment, on this machine."""
        return Path(self.nni.config.experiment_working_directory).expanduser().absolute() / str(self.nni.id)

    def start(self, port: int, trials_at: str) -> None:
        """Start the manager on ``port`` (0 for a free one); trial commands connect to the Unix socket ``trials_at``."""
        port = _free_port(port)
        with _environment(trials_at, self._host), _patience():
            self.nni.start(port)

    def state(self) -> ExperimentState:
        """Fetch the experiment's state from the manager; raise ``OSError`` if it does not answer."""
        from nni.experiment import rest

        rows = rest.get(self.nni.port, "/trial-jobs")
        status = rest.get(self.nni.port, "/check-status")
        return ExperimentState(
            status=status["status"],
            trials={row["trialJobId"]: row for row in rows},
            errors="; ".join(status.get("errors") or ()),
        )

    def tuners_words(self) -> str:
        """Return the last error message in the NNI tuner's log, or a sentence saying that there is none."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "log" / "dispatcher.log").read_text(errors="replace").splitlines()
            return next((line for line in reversed(lines) if _ERROR.match(line)), "it left no error")
        return "it left no log"

    def stop(self) -> None:
        """Stop the manager, and the trials' commands with it."""
        self.nni.stop()


def _configured(tuner: Algorithm, assessor: Algorithm | None, settings: Mapping[str, Any]) -> Any:
    """Return a configured ``nni.experiment.Experiment`` that is not started yet; raise ImportError without NNI."""
    try:
        import nni
        from nni.experiment import Experiment
    except ImportError as error:
        raise ImportError(f"NNI cannot be imported ({error}): pip install 'elastic-ray[nni]'") from error
    nni.silence_stdout()  # it would name addresses that no process listens at
    experiment = Experiment("local")
    theirs = experiment.config
    for name, value in settings.items():
        setattr(theirs, name, value)
    theirs.trial_command = f'exec "{sys.executable}" -m tuning.nni.trial'
    theirs.tuner = _algorithm(tuner)
    if assessor is not None:
        theirs.assessor = _algorithm(assessor)
    return experiment


def _algorithm(algorithm: Algorithm) -> Any:
    """Return NNI's configuration for an algorithm: a custom one for the user's class or our replacement class."""
    from nni.experiment import AlgorithmConfig, CustomAlgorithmConfig

    arguments = dict(algorithm.class_args)
    own = KNOWN[algorithm.name].class_name if algorithm.name else ""
    if own:
        return CustomAlgorithmConfig(class_name=own, code_directory=str(_PACKAGE), class_args=arguments)
    if algorithm.name:
        return AlgorithmConfig(name=algorithm.name, class_args=arguments)
    return CustomAlgorithmConfig(
        class_name=algorithm.class_name, code_directory=algorithm.code_directory, class_args=arguments
    )


@contextlib.contextmanager
def _environment(trials_at: str, host: str) -> Iterator[None]:
    """Set the environment for the manager and, through it, for every trial's command."""
    preload = json.dumps(str(Path(__file__).with_name("manager.js")))
    wanted = {
        ADDRESS: trials_at,
        "ELASTIC_RAY_NNI_HOST": host,
        "NODE_OPTIONS": f"{os.environ.get('NODE_OPTIONS', '')} --require {preload}".strip(),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_PACKAGE), os.environ.get("PYTHONPATH")])),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Give NNI's manager more than its default 3 s to answer, which is too short on a busy machine."""
    from nni.experiment import launcher

    before = launcher._check_rest_server
    launcher._check_rest_server = functools.partial(before, retry=_START_TIMEOUT_S)
    try:
        yield
    finally:
        launcher._check_rest_server = before


def _free_port(port: int) -> int:
    """Return the port itself, or any free port for 0; raise RuntimeError if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RuntimeError(
                f"port {port} is taken ({error}): NNI's web page needs its own port; port=0 picks a free one"
            ) from error
        return int(probe.getsockname()[1])
