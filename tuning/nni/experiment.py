"""SHELL: NNI experiments, with NNI's manager and web page, where each trial is an elastic job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import ray
from ray.train.v2.api.config import ScalingConfig

from elastic_ray.access import join
from elastic_ray.checkpoints.run_directory import resolve
from elastic_ray.config import ElasticConfig, SchedulingConfig
from elastic_ray.driver.trainer import check_resources
from placement.checks import check_whole
from placement.text import printable
from tuning.nni.algorithms import check_together, promise_of, read_assessor, read_tuner
from tuning.nni.manager import HOSTS, ExperimentState, Manager
from tuning.nni.results import ExperimentFailedError, Outcome, Results
from tuning.nni.serving import ExperimentContext, TrialServer
from tuning.nni.spaces import check_space
from tuning.nni.wire import DEFAULT
from tuning.sweep import StopWatch, SweepDriver, claim_sweep, release_sweep, this_driver
from tuning.trial_job import make_template
from tuning.trials import Promise

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_LOST_AFTER_S = 10.0  # a head that was restarted is back by then
_EXHAUSTED_AFTER_S = 4.0  # without a running trial, after the tuner had no more; it may have some after a trial's end
_STOP_TIMEOUT_S = 10.0
_ENDS = ("DONE", "STOPPED", "STOPPING")
_RUNS = ("RUNNING", "WAITING")
_CANCELED = "USER_CANCELED"  # NNI's word for what ran when its experiment was stopped
_NAME = r"[A-Za-z0-9._=,+-]{1,100}"


class Experiment:
    """NNI experiment, with NNI's manager, web page and tuner, where each trial is an elastic job.

    Run it with ``Experiment(train, {"lr": {"_type": "loguniform", "_value": [1e-4, 1e-1]}},
    max_trial_number=24).run(8080)``. ``train`` is a train loop that calls NNI's functions (``nni.get_next_parameter``,
    ``report_intermediate_result``, ``report_final_result``), or a train loop that receives the parameters as its config
    and calls ``elastic_ray.report``. Every worker calls these functions; only rank 0's reports count. If a learning
    rate is among the parameters, it applies to the loader's initial batch size and is scaled from there when the batch
    grows.

    Trials run on the Ray cluster that this process is connected to, or else on the cluster at ``RAY_ADDRESS``, and end
    when this process ends.

    Args:
        train_loop_or_trainer: A train loop, or an ``ElasticTrainer`` whose settings apply to all trials.
        search_space: Search space in NNI's format.
        tuner: Name, or an NNI ``tuner`` configuration: ``{"name": ..., "class_args": {...}}``.
        assessor: Assessor, in the same forms as ``tuner``; with None, no trial is stopped early.
        metric: Name of the reported metric. Values reported through NNI's own functions are always accepted.
        mode: "max" if a larger metric is better, "min" otherwise; passed on to the tuner and assessor.
        trial_concurrency: Number of trials that run at the same time.
        max_trial_number: Total number of trials; None for no limit other than the tuner's.
        max_experiment_duration: Time after which no trial is started, such as "1h" or "30m"; None for no limit.
        train_loop_config: As for ``ElasticTrainer``; a trial's parameters override it.
        scaling_config: Workers per trial, ``num_workers=(min, max)``, and the resources of each worker.
        elastic_config: As for ``ElasticTrainer``, except that ``warm_workers_per_node`` defaults to 0.
        scheduling_config: As for ``ElasticTrainer``. If it names no tenant (the owner that receives a share of the
            cluster from the allocator), the experiment gets its own tenant.
        model_fingerprint: As for ``ElasticTrainer``.
        weight: Weight of the experiment relative to other jobs.
        promise: Rule for comparing running trials, so that the best get more workers (see ``tuning.Promise``); None
            derives the rule from the assessor. If a report lacks the rule's metric, the value that NNI sees (usually
            "default") is used. The rule's mode must equal ``mode``.
        name: Name of the experiment, shown on the web page and in the cluster's tools.
        storage_path: Directory or URI for the trials' events and checkpoints, visible to all nodes; by default, NNI's
            directory for the experiment.
        directory: NNI's ``experiment_working_directory``; ``nnictl`` only searches NNI's default directory.
        host: Address that the web page and REST API listen on: "127.0.0.1" is reachable only from this machine,
            "0.0.0.0" from every machine. They have no password and can start commands.

    Raises:
        TypeError, ValueError: An argument is invalid.
        ImportError: NNI is not installed.
    """

    def __init__(
        self,
        train_loop_or_trainer: Any,
        search_space: Mapping[str, Any],
        *,
        tuner: Any = "TPE",
        assessor: Any = None,
        metric: str = DEFAULT,
        mode: str = "max",
        trial_concurrency: int = 2,
        max_trial_number: int | None = None,
        max_experiment_duration: str | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        elastic_config: ElasticConfig | None = None,
        scheduling_config: SchedulingConfig | None = None,
        model_fingerprint: str | None = None,
        weight: float = 1.0,
        promise: Promise | None = None,
        name: str | None = None,
        storage_path: str | None = None,
        directory: str = "~/nni-experiments",
        host: str = HOSTS[0],
    ) -> None:
        chosen, judge = read_tuner(tuner, mode), read_assessor(assessor, mode)
        check_together(chosen, judge)
        check_whole("trial_concurrency", trial_concurrency, least=1)
        if max_trial_number is not None:
            check_whole("max_trial_number", max_trial_number, least=1)
        if not isinstance(metric, str) or not metric:
            raise ValueError(f"metric must be the name of a reported metric, but got {metric!r}")
        if name is not None and not re.fullmatch(_NAME, name):
            raise ValueError(f"name must be letters, digits or ._=,+- (actors are named after it), but got {name!r}")
        if host not in HOSTS:
            raise ValueError(f"host must be {HOSTS[0]!r} (this machine only) or {HOSTS[1]!r} (all), but got {host!r}")
        settings = {
            "experiment_name": name,
            "search_space": check_space(search_space, chosen),
            "trial_concurrency": trial_concurrency,
            "max_trial_number": max_trial_number,
            "max_experiment_duration": max_experiment_duration,
            "experiment_working_directory": directory,
        }
        template = make_template(
            train_loop_or_trainer,
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
            elastic_config=elastic_config,
            scheduling_config=scheduling_config,
            model_fingerprint=model_fingerprint,
            weight=weight,
            promise=_agreed(promise, mode) or promise_of(judge, metric, mode),
        )
        self._template = dataclasses.replace(template, metric_else=(metric, DEFAULT))
        self._name, self._metric, self._mode, self._storage_path = name, metric, mode, storage_path
        self._manager = Manager(host, chosen, judge, settings)
        self._server: TrialServer | None = None
        self._address = ""
        self._last: ExperimentState | None = None
        self._answered_s = self._busy_s = 0.0
        self._stops = StopWatch()
        self._driver: SweepDriver | None = None
        self._stopped = False

    @property
    def nni(self) -> Any:
        """NNI's own ``Experiment``, for methods that this class lacks, such as ``update_trial_concurrency``."""
        return self._manager.nni

    @property
    def id(self) -> str:
        """Id that NNI has assigned to the experiment."""
        return str(self.nni.id)

    @property
    def url(self) -> str:
        """Address of the web page; empty while the experiment is not running."""
        return self._manager.url

    def run(self, port: int = 8080) -> Results:
        """Run the experiment until it ends, and return its results; Ctrl-C stops it.

        The web page exists only while the experiment is running; ``nnictl view ID`` shows it again later.

        Args:
            port: Port of the web page and REST API; 0 picks a free one.

        Raises:
            ExperimentFailedError: The Ray cluster, NNI's manager or the tuner failed. The error holds the results.
            ImpossibleResourcesError: The cluster could never run a trial.
            RuntimeError: The port is in use, or another experiment with this name is running.
        """
        self.start(port)
        try:
            self.wait()
        finally:
            self.stop()
        return self.results()

    def start(self, port: int = 8080) -> None:
        """Start the experiment and return at once; ``stop()`` ends it. For arguments and errors, see :meth:`run`."""
        if self._server is not None:
            raise RuntimeError(f"experiment {self.id} was started before; create another one")
        join()
        check_resources(self._template.spec)
        self._address = ray.get_runtime_context().gcs_address
        context = self._context()
        driver = this_driver(context.path, self._template.promise)
        claim_sweep(self._sweep, driver)
        self._driver = driver
        self._answered_s = self._busy_s = time.monotonic()
        self._server = TrialServer(self._template, self._metric, context)
        try:
            self._manager.start(port, self._server.address)
        except BaseException:
            self.stop()
            raise
        print(f"NNI experiment {self.id}: {self.url}", flush=True)

    def wait(self) -> None:
        """Wait until the experiment ends, but leave its processes running. Raises the same errors as :meth:`run`."""
        while not self._over():
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End the experiment and its trials, and release all their resources."""
        if self._manager.running:
            self._poll()
            self._manager.stop()
            self._stopped = True
        if self._server is not None:
            there = self._reachable()
            self._server.close(_STOP_TIMEOUT_S if there else 0.0)
            if there and self._driver is not None:
                release_sweep(self._sweep, self._driver)

    def results(self) -> Results:
        """Return all trials so far in numerical order, each with its parameters, metric values and status."""
        self._poll()
        known = self._server.outcomes() if self._server is not None else {}
        trials = []
        for trial, row in (self._last.trials if self._last is not None else {}).items():
            found = known.get(trial) or Outcome(trial=trial, sequence=-1, status="")
            sequence = int(row.get("sequenceId", found.sequence))
            parameters = found.parameters or _parameters(row)
            status = _CANCELED if self._stopped and row["status"] in _RUNS else row["status"]
            trials.append(dataclasses.replace(found, sequence=sequence, status=status, parameters=parameters))
        ordered = tuple(sorted(trials, key=lambda each: each.sequence))
        return Results(experiment=self.id, trials=ordered, mode=self._mode)

    def _poll(self) -> None:
        if self._manager.running:
            with contextlib.suppress(OSError):
                self._last = self._manager.state()

    @property
    def _sweep(self) -> str:
        return self._name or f"nni-{self.id}"

    def _context(self) -> ExperimentContext:
        """Return the trials' names and paths: below ``storage_path`` if given, otherwise in NNI's experiment folder."""
        root, inside = str(self._manager.folder.parent), f"{self.id}/elastic_trials"
        if self._storage_path is not None:
            root, inside = self._storage_path, self.id
        filesystem, path = resolve(root, None)
        return ExperimentContext(
            experiment=self.id,
            sweep=self._sweep,
            path=f"{path.rstrip('/')}/{inside}",
            knowledge_path=path,
            filesystem=filesystem,
            reachable=self._reachable,
        )

    def _reachable(self) -> bool:
        """True if the head of the Ray cluster answers. Ray's own calls would block for a minute."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
        except OSError:
            return False
        return True

    def _over(self) -> bool:
        """True if the experiment has ended or has no more trials; raise ExperimentFailedError if it has failed."""
        now_s = time.monotonic()
        if self._reachable():
            self._answered_s = now_s
        elif now_s > self._answered_s + _LOST_AFTER_S:
            self._fail(
                f"the Ray cluster at {self._address} has not answered for {_LOST_AFTER_S:g} s, and the trials that ran "
                "on it are lost; start it again, and another experiment. Finished trials are in the results of this "
                "error, and in NNI's own records"
            )
        try:
            state = self._last = self._manager.state()
        except OSError as error:
            if self._manager.alive:  # but busy
                return False
            self._fail(f"NNI's manager has ended ({error}); its log is in {self._manager.folder / 'log'}")
        words, logs = self._manager.tuners_words, f"logs are in {self._manager.folder / 'log'}"
        if state.status == "ERROR":
            self._fail(f"NNI's manager has failed: {state.errors} ({words()}); {logs}")
        if state.status not in _ENDS and not self._manager.tuner_works():
            self._fail(f"the tuner has failed: {words()}; {logs}")
        answers = self._answered_s == now_s
        if answers and (reason := self._stops.poll(self._sweep, self._driver)):
            logger.warning("experiment %s ends with what there is: %s", self.id, printable(reason))
            return True
        if any(row["status"] in _RUNS for row in state.trials.values()):
            self._busy_s = now_s
        exhausted = state.status == "TUNER_NO_MORE_TRIAL" and now_s > self._busy_s + _EXHAUSTED_AFTER_S
        return exhausted or state.status in _ENDS

    def _fail(self, why: str) -> NoReturn:
        results = self.results()
        done = len(results.finished)
        raise ExperimentFailedError(f"experiment {self.id}: {why}. {done} trial(s) had finished", results)


def _agreed(promise: Promise | None, mode: str) -> Promise | None:
    """Return the promise; raise ValueError if its mode differs from the experiment's."""
    if isinstance(promise, Promise) and promise.mode != mode:
        raise ValueError(
            f"promise.mode must be {mode!r}, the experiment's mode, but got {promise.mode!r}: trials would grow that "
            "NNI's tuner takes for bad; set Experiment(mode=...) and Promise(mode=...) alike"
        )
    return promise


def _parameters(row: Mapping[str, Any]) -> Mapping[str, Any]:
    for text in row.get("hyperParameters") or ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found: Mapping[str, Any] = json.loads(text)["parameters"]
            return found
    return {}
