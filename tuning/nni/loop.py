"""Train loops as trials of an NNI experiment: NNI's functions for trial code work in every worker."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import nni.trial
from nni.runtime.trial_command_channel import TrialCommandChannel, set_default_trial_command_channel

import elastic_ray
from elastic_ray.worker.train_loop import PickledTrainLoop
from tuning.nni.wire import DEFAULT, FINAL, PARAMETER, TrialId


class ReportChannel(TrialCommandChannel):  # type: ignore[misc]  # NNI has no types
    """Channel used by NNI's trial functions. Every worker calls it; as for all reports, only rank 0's count."""

    def receive_parameter(self) -> Any:
        """Return the tuner's parameters, which are the same on every worker."""
        return json.loads(os.environ[PARAMETER])

    def send_metric(self, type: str, parameter_id: Any, trial_job_id: Any, sequence: int, value: Any) -> None:
        """Report a metric to the experiment through the job, which drops duplicates after a restart or a join."""
        metrics = dict(value) if isinstance(value, Mapping) else {DEFAULT: value}
        elastic_ray.report({**metrics, FINAL: True} if type == "FINAL" else metrics)


def adopt(trial: TrialId) -> None:
    """Point this process's NNI module, which still refers to an earlier trial, at the given trial."""
    nni.trial._experiment_id = trial.experiment
    nni.trial._trial_id = trial.trial
    nni.trial._sequence_id = trial.sequence
    nni.trial._params = None
    nni.trial.overwrite_intermediate_seq(0)
    set_default_trial_command_channel(ReportChannel())


_CHANNEL = "import://tuning.nni.loop.ReportChannel"


class TrialLoop(PickledTrainLoop):
    """Train loop of a trial in a worker. NNI is imported only if the user's loop imports it.

    Args:
        packed: The user's loop, packed by ``elastic_ray.worker.train_loop.pack``.
        trial: Source of the answers of ``nni.get_next_parameter``, ``get_trial_id`` and similar functions.
    """

    def __init__(self, packed: bytes, trial: TrialId) -> None:
        super().__init__(packed)
        self._trial = trial

    def __call__(self, config: Mapping[str, Any]) -> Any:
        # NNI reads these when it is imported. NNI_PLATFORM stays unset: with it, NNI would take over standard output.
        os.environ.update(
            NNI_EXP_ID=self._trial.experiment,
            NNI_TRIAL_JOB_ID=self._trial.trial,
            NNI_TRIAL_SEQ_ID=str(self._trial.sequence),
            NNI_TRIAL_COMMAND_CHANNEL=_CHANNEL,
        )
        os.environ[PARAMETER] = json.dumps(dict(self._trial.parameter))
        if "nni.trial" in sys.modules:  # an earlier trial in this process has imported it
            from tuning.nni.loop import adopt

            adopt(self._trial)
        return super().__call__(config)
