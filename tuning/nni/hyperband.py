"""SHELL: NNI's Hyperband, patched to work with this package."""

from __future__ import annotations

from typing import Any

from nni.algorithms.hpo.hyperband_advisor import Hyperband as NNIHyperband


class TextIds:
    """Mixin for ids that are text; NNI 3.0 compares ids as numbers to recognise those of a resumed experiment."""

    def is_created_in_previous_exp(self, param_id: Any) -> bool:
        """Return False, since advisors keep nothing from an earlier run."""
        return False


class Hyperband(TextIds, NNIHyperband):  # type: ignore[misc]  # NNI has no types
    """NNI's advisor for ``tuner="Hyperband"``, changed to use text ids."""
