"""SHELL: NNI's BOHB as it must be to run."""

from __future__ import annotations

from nni.algorithms.hpo.bohb_advisor import BOHB as NNIBOHB

from tuning.nni.hyperband import TextIds


class BOHB(TextIds, NNIBOHB):  # type: ignore[misc]  # NNI has no types
    """``tuner="BOHB"``."""
