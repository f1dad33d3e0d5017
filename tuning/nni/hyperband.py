"""SHELL: NNI's Hyperband as it must be to run."""

from __future__ import annotations

from typing import Any

from nni.algorithms.hpo.hyperband_advisor import Hyperband as NNIHyperband


class TextIds:
    """NNI 3.0 compares the numbers of parameters to find those of a resumed experiment; its advisors' are text."""

    def is_created_in_previous_exp(self, param_id: Any) -> bool:
        """Return False: advisors keep nothing of an earlier run."""
        return False


class Hyperband(TextIds, NNIHyperband):  # type: ignore[misc]  # NNI has no types
    """``tuner="Hyperband"``."""
