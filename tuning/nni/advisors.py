"""SHELL: NNI's advisors as they must be to run."""

from __future__ import annotations

from typing import Any

from nni.algorithms.hpo.hyperband_advisor import Hyperband as NNIHyperband


class Hyperband(NNIHyperband):  # type: ignore[misc]  # NNI has no types
    """NNI 3.0 compares the numbers of parameters to find those of an earlier run; Hyperband's are text."""

    def is_created_in_previous_exp(self, param_id: Any) -> bool:
        """Hyperband keeps nothing of an earlier run, so that what it did not start itself is from there."""
        return param_id is None or str(param_id).partition("_")[0] not in self.brackets
