"""A train loop as the trial of an NNI experiment: the functions that NNI gives trial code work in every worker."""

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
    """Channel that NNI's trial functions use; every worker calls it, and rank 0's reports count, as for all reports."""

    def receive_parameter(self) -> Any:
        """Return the tuner's parameters, equal on every worker."""
        return json.loads(os.environ[PARAMETER])

    def send_metric(self, type: str, parameter_id: Any, trial_job_id: Any, sequence: int, value: Any) -> None:
        """Report to the experiment, by way of the job, so that nothing is told twice after a restart or a join."""
        metrics = dict(value) if isinstance(value, Mapping) else {DEFAULT: value}
        elastic_ray.report({**metrics, FINAL: True} if type == "FINAL" else metrics)


def adopt(trial: TrialId) -> None:
    """Let this process's NNI, which is another trial's so far, be this one's."""
    nni.trial._experiment_id = trial.experiment
    nni.trial._trial_id = trial.trial
    nni.trial._sequence_id = trial.sequence
    nni.trial._params = None
    nni.trial.overwrite_intermediate_seq(0)
    set_default_trial_command_channel(ReportChannel())


_CHANNEL = "import://tuning.nni.loop.ReportChannel"


class TrialLoop(PickledTrainLoop):
    """Train loop of a trial in a worker; NNI is imported only if the user's loop imports it.

    Args:
        packed: the user's loop, as ``elastic_ray.worker.train_loop.pack`` made it.
        trial: what ``nni.get_next_parameter``, ``get_trial_id`` and so on are to answer.
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
