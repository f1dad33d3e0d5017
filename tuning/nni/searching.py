"""SHELL: NNI's tuners as a Ray Tune ``Searcher`` and its assessors as a ``TrialScheduler``, without NNI's manager."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import deque
from collections.abc import Mapping
from typing import Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from tuning.nni.algorithms import Algorithm, read_assessor, read_tuner
from tuning.nni.spaces import check_space, from_tune
from tuning.nni.wire import finite

logger = logging.getLogger(__name__)


class NNISearch(Searcher):
    """Ray Tune searcher that uses an NNI tuner, for ``TuneConfig(search_alg=...)``.

    Use it as ``TuneConfig(search_alg=NNISearch("TPE"), metric="accuracy", mode="max")``. The search space is the
    ``Tuner``'s ``param_space``, or a space in NNI's format.

    Args:
        tuner: Name, or an NNI ``tuner`` configuration: ``{"name": ..., "class_args": {...}}``.
        space: Search space in NNI's format; None uses ``param_space``.
        metric: Name of the reported metric; None uses ``TuneConfig``'s.
        mode: "max" or "min", passed on to the tuner; None uses ``TuneConfig``'s.

    Raises:
        TypeError, ValueError: An argument is invalid, or the tuner is not supported or needs NNI's manager.
        ImportError: NNI is not installed.

    Examples:
        >>> from tuning.nni import NNISearch
        >>> NNISearch(metric="accuracy", mode="max").metric
        'accuracy'
    """

    def __init__(
        self,
        tuner: Any = "TPE",
        space: Mapping[str, Any] | None = None,
        *,
        metric: str | None = None,
        mode: str | None = None,
    ) -> None:
        super().__init__(metric=metric, mode=mode)
        self._given = tuner
        algorithm = read_tuner(tuner, mode or "max", in_tune=True)
        self._space = None if space is None else check_space(space, algorithm)
        self._tuner: Any = None
        self._count = 0
        self._parameters: dict[int, Any] = {}
        self._ready: deque[int] = deque()  # what the tuner has given, at once or later
        self._refused = False  # since the last result
        self._ids: dict[str, int] = {}
        if self._space is not None and metric and mode:
            self._open(self._space)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Set the metric, mode and search space that Ray Tune passes; return False if they conflict with earlier ones.

        Parameters to search in ``config`` conflict with a space that is already set. Raises ValueError if there are no
        parameters to search, or no metric or mode.
        """
        searched, _ = from_tune(config)
        if self._space is not None and searched:
            return False
        if self._tuner is not None:
            return not searched and metric in (None, self._metric) and mode in (None, self._mode)
        self._metric, self._mode = self._metric or metric, self._mode or mode
        if self._space is None and not searched:
            raise ValueError(
                "there is nothing to search: Tuner(param_space=...) and NNISearch(space=...) have no parameter"
            )
        if self._metric is None or self._mode is None:
            raise ValueError("NNISearch needs a metric to optimise: TuneConfig(metric=..., mode='max')")
        self._open(self._space or searched)
        return True

    def suggest(self, trial_id: str) -> Any:
        """Return parameters for a new trial, None while the tuner waits for results, ``FINISHED`` if none are left."""
        if self._tuner is None:
            raise RuntimeError("NNISearch has no search space yet: it is to be used by a ray.tune.Tuner")
        if not self._ready and not self._refused:
            self._ask()
        if not self._ready:
            return None if self._ids else self.FINISHED
        index = self._ready.popleft()
        self._ids[trial_id] = index
        return dict(self._parameters[index])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Report a trial's last metric value to the tuner, or just that it has ended, if it failed or has no value."""
        index = self._ids.pop(trial_id, None)
        if index is None:
            return
        self._refused = False
        parameters = self._parameters.pop(index)
        value = None if error or result is None else finite(result.get(str(self._metric)))
        if value is not None:
            self._tuner.receive_trial_result(index, parameters, value)
        self._tuner.trial_end(index, value is not None)

    def save(self, checkpoint_path: str) -> None:
        """Save the tuner and its state to a file that ``Tuner.restore`` continues the search from."""
        state = {name: value for name, value in vars(self).items() if name != "_tuner"}
        tuner = copy.copy(self._tuner)  # the one in use keeps its callback
        if hasattr(tuner, "send_trial_callback"):
            tuner.send_trial_callback = None
        with open(checkpoint_path, "wb") as file:
            pickle.dump((state, tuner), file)

    def restore(self, checkpoint_path: str) -> None:
        """Restore a searcher that was saved by :meth:`save`."""
        with open(checkpoint_path, "rb") as file:
            state, self._tuner = pickle.load(file)
        if hasattr(self._tuner, "send_trial_callback"):
            self._tuner.send_trial_callback = self._later
        vars(self).update(state)

    def _open(self, space: Mapping[str, Any]) -> None:
        algorithm = read_tuner(self._given, self._mode or "max", in_tune=True)
        self._space = check_space(space, algorithm)
        self._tuner = make(algorithm, "tuners")
        self._tuner.update_search_space(self._space)

    def _ask(self) -> None:
        """Request parameters from the tuner, which may also deliver them later through the callback."""
        from nni import NoMoreTrialError

        index, self._count = self._count, self._count + 1
        try:
            given = self._tuner.generate_multiple_parameters([index], st_callback=self._later)
        except NoMoreTrialError:
            given = []
        except RuntimeError:  # Evolution, while its whole population runs
            if not self._ids:
                raise
            given = []
        if given:
            self._later(index, given[0])
        else:
            self._refused = bool(self._ids)

    def _later(self, index: int, parameters: Any) -> None:
        self._parameters[index] = {name: _plain(value) for name, value in parameters.items()}
        self._ready.append(index)


class AssessorScheduler(FIFOScheduler):
    """Ray Tune scheduler that stops trials that an NNI assessor considers hopeless, for ``TuneConfig(scheduler=...)``.

    Args:
        assessor: "Medianstop", "Curvefitting", or an NNI ``assessor`` configuration.
        metric: Name of the reported metric; None uses ``TuneConfig``'s.
        mode: "max" or "min", passed on to the assessor; None uses ``TuneConfig``'s.

    Raises:
        TypeError, ValueError: An argument is invalid.
        ImportError: NNI is not installed.

    Examples:
        >>> from tuning.nni import AssessorScheduler
        >>> AssessorScheduler(metric="accuracy", mode="max").metric
        'accuracy'
    """

    def __init__(self, assessor: Any = "Medianstop", *, metric: str | None = None, mode: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = assessor
        self._metric, self._mode = metric, mode
        self._assessor: Any = None
        self._history: dict[str, list[float]] = {}
        if read_assessor(assessor, mode or "max") is None:
            raise ValueError("assessor must be a name such as 'Medianstop', but got None")

    @property
    def metric(self) -> str | None:
        """Metric used to compare trials; None until ``set_search_properties`` if the constructor received none."""
        return self._metric

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Set the metric and mode; return False if Ray Tune passes either of them although it is already set."""
        if (metric and self._metric) or (mode and self._mode):
            return False
        self._metric, self._mode = self._metric or metric, self._mode or mode
        return True

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return Ray Tune's "CONTINUE" or "STOP", according to the assessor's verdict on the trial's values so far."""
        value = finite(result.get(str(self._metric)))
        if result.get("done") or value is None:
            return str(TrialScheduler.CONTINUE)
        history = self._history.setdefault(trial.trial_id, [])
        history.append(value)
        verdict = self._made().assess_trial(trial.trial_id, list(history))
        good = verdict is None or bool(getattr(verdict, "value", verdict))
        return str(TrialScheduler.CONTINUE if good else TrialScheduler.STOP)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Notify the assessor that the trial has completed."""
        self._end(trial, good=True)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Notify the assessor that the trial has failed."""
        self._end(trial, good=False)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Notify the assessor that the trial was removed, which counts as a failure."""
        self._end(trial, good=False)

    def _end(self, trial: Any, *, good: bool) -> None:
        if self._history.pop(trial.trial_id, None) is not None:
            self._made().trial_end(trial.trial_id, good)

    def _made(self) -> Any:
        if self._assessor is None:
            if self._metric is None or self._mode is None:
                raise ValueError("AssessorScheduler needs a metric to optimise: TuneConfig(metric=..., mode='max')")
            algorithm = read_assessor(self._given, self._mode)
            assert algorithm is not None, "checked when this was made"
            self._assessor = make(algorithm, "assessors")
        return self._assessor


def make(algorithm: Algorithm, kind: str) -> Any:
    """Return a new instance of NNI's algorithm or of the user's class; ``kind`` is "tuners" or "assessors"."""
    try:
        import nni
        from nni.tools.package_utils import tuner_factory
    except ImportError as error:
        raise ImportError(f"NNI cannot be imported ({error}): pip install 'elastic-ray[nni]'") from error
    nni.silence_stdout()
    if algorithm.name:
        return tuner_factory.create_builtin_class_instance(algorithm.name, dict(algorithm.class_args), kind)
    return tuner_factory.create_customized_class_instance(
        {
            "codeDirectory": algorithm.code_directory,
            "className": algorithm.class_name,
            "classArgs": dict(algorithm.class_args),
        }
    )


def _plain(value: Any) -> Any:
    """Return a NumPy scalar, which some tuners leave in parameters, as a plain value."""
    return value.item() if hasattr(value, "item") and not isinstance(value, Mapping) else value
