"""SHELL: NNI's BOHB, patched to work with this package."""

from __future__ import annotations

from nni.algorithms.hpo.bohb_advisor import BOHB as NNIBOHB

from tuning.nni.hyperband import TextIds


class BOHB(TextIds, NNIBOHB):  # type: ignore[misc]  # NNI has no types
    """NNI's advisor for ``tuner="BOHB"``, changed to use strings as parameter ids."""
