"""What loggers need so that a run stays one run when another process goes on with it.

A logger that has ``get_state`` and ``set_state`` (Ray Tune's protocol) says so itself, as far as JSON can carry its
state: what another process has written down is never unpickled. Ray's own for MLflow and Weights
& Biases have neither: of the first, the run id is put back where it keeps it; the second gets ``resume="allow"``, which
its constructor takes for ``wandb.init``. Others (Comet, Aim) begin another run.
"""

from __future__ import annotations

import json
from typing import Any

from elastic_ray.observe.trackers.trial_view import TrialView

_MOST_STATE = 1 << 16  # characters


def before_setup(logger: Any) -> None:
    """Have Weights & Biases go on with a run of the same id, where there is one."""
    if _is(logger, "WandbLoggerCallback"):
        logger.kwargs.setdefault("resume", "allow")


def go_on(logger: Any, trial: TrialView | None, state: str) -> None:
    """After its ``setup``: go on with the run of this state."""
    kind, _, value = state.partition(":")
    if kind == "mlflow" and isinstance(getattr(logger, "_trial_runs", None), dict):
        logger._trial_runs[trial] = value
    elif kind == "own" and hasattr(logger, "set_state"):
        logger.set_state(json.loads(value))


def state_of(logger: Any, trial: TrialView | None) -> str | None:
    """By which its run is found again; None where it has no way to say so, or says too much."""
    runs = getattr(logger, "_trial_runs", None)
    if _is(logger, "MLflowLoggerCallback") and isinstance(runs, dict) and trial in runs:
        return f"mlflow:{runs[trial]}"
    get_state = getattr(logger, "get_state", None)
    state = get_state() if get_state is not None else None
    if state is None:
        return None
    try:
        text = f"own:{json.dumps(state)}"
    except (TypeError, ValueError, RecursionError):  # no JSON
        return None
    return text if len(text) <= _MOST_STATE else None


def known_reports(logger: Any, trial: TrialView) -> frozenset[int]:
    """Reports that its run has, where the tracker can be asked: a process may die before it notes what it has told."""
    runs = getattr(logger, "_trial_runs", None)
    if not _is(logger, "MLflowLoggerCallback") or not isinstance(runs, dict) or trial not in runs:
        return frozenset()
    points = logger.mlflow_util._get_client().get_metric_history(runs[trial], "training_iteration")
    return frozenset(int(point.step) for point in points)


def _is(logger: Any, *names: str) -> bool:
    """Whether it is of such a class; the classes' modules may not be there."""
    return any(each.__name__ in names for each in type(logger).__mro__)
