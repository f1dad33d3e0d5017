"""Messages between NNI's manager, a trial's command and the process that holds the trial's job (pure, light)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

ADDRESS = "ELASTIC_RAY_NNI"
"""Environment variable: the Unix socket of the experiment's process."""

SENT = {"trial": "NNI_TRIAL_JOB_ID", "sequence": "NNI_TRIAL_SEQ_ID", "channel": "NNI_TRIAL_COMMAND_CHANNEL"}
"""What a trial's command tells of itself, and the environment variables of NNI's that it has it from."""

PARAMETER = "ELASTIC_RAY_NNI_PARAMETER"
"""Environment variable of a worker: what the tuner chose, as JSON."""

FINAL = "nni_final"
"""In what a worker reports: this is ``nni.report_final_result``'s."""

DEFAULT = "default"
"""NNI's name for the metric that tuners and assessors see."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialId:
    """Identity of a trial in NNI, with the parameters that the tuner chose."""

    experiment: str  # NNI's id of the experiment
    trial: str  # NNI's id of the trial
    sequence: int  # number of the trial in the experiment, from 0
    parameter: Mapping[str, Any]  # the tuner's record, with ``parameter_id`` and ``parameters``


def shown(metrics: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the part of a report that NNI receives: the metric as ``default``, and other numbers and strings.

    If the report lacks ``metric``, its own ``default`` is used. Raises ValueError, listing the reported metrics, if
    ``default`` is missing too or the value is not a finite number.
    """
    name = metric if metric in metrics else DEFAULT
    value = finite(metrics.get(name))
    if value is None:
        had = ", ".join(f"{key}={metrics[key]!r}" for key in metrics if key != FINAL) or "nothing"
        raise ValueError(
            f"a trial must report a finite number as {metric!r}, but reported {had}: call "
            f"elastic_ray.report({{{metric!r}: ...}}) or nni.report_intermediate_result(...), or name "
            "the metric in Experiment(metric=...)"
        )
    others = {key: _plain(each) for key, each in metrics.items() if key not in (FINAL, name, DEFAULT)}
    return {DEFAULT: value, **{key: each for key, each in others.items() if each is not None}}


def metric_message(trial: TrialId, *, final: bool, index: int, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message that reports a trial's metric to NNI's manager."""
    data = {
        "parameter_id": trial.parameter.get("parameter_id"),
        "trial_job_id": trial.trial,
        "type": "FINAL" if final else "PERIODICAL",
        "sequence": 0 if final else index,
        "value": json.dumps(value if len(value) > 1 else value[DEFAULT]),
    }
    return {"type": "metric", "metric": json.dumps(data)}


def finite(value: Any) -> float | None:
    """Return a reported number (Python, NumPy or a tensor) as a float; None if it is a string or not finite."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _plain(value: Any) -> float | str | None:
    return value if isinstance(value, str) else finite(value)
