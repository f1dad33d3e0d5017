"""SHELL: NNI's Hyperband, patched to work with this package."""

from __future__ import annotations

from typing import Any

from nni.algorithms.hpo.hyperband_advisor import Hyperband as NNIHyperband


class TextIds:
    """Mixin for NNI advisors that use strings as parameter ids; NNI 3.0 would compare the ids as numbers."""

    def is_created_in_previous_exp(self, param_id: Any) -> bool:
        """Return False, since NNI's advisors keep no parameters from an earlier run of the experiment."""
        return False


class Hyperband(TextIds, NNIHyperband):  # type: ignore[misc]  # NNI has no types
    """NNI's advisor for ``tuner="Hyperband"``, changed to use strings as parameter ids."""
