"""Train loops as trials of an NNI experiment; NNI's functions for trial code work in their workers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from elastic_ray.worker.train_loop import PickledTrainLoop
from tuning.nni.wire import PARAMETER, TrialId

_CHANNEL = "import://tuning.nni.channel.ReportChannel"


class TrialLoop(PickledTrainLoop):
    """Train loop of a trial, called in each worker; NNI is imported only if the user's loop imports it."""

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
            from tuning.nni.channel import adopt

            adopt(self._trial)
        return super().__call__(config)
