"""Accelerate's own tests, from its source distribution, run against elastic-ray's ``Accelerator``.

Lightning's and transformers' are in no distribution: ``test_same_hooks.py`` compares with what those themselves do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = (
    "accelerator",
    "state_checkpointing",
    "optimizer",
    "grad_sync",
    "scheduler",
    "kwargs_handlers",
    "data_loader",
)

# Pattern of names -> why the test does not speak about elastic jobs. Each must fail, or it belongs to the rest.
NOT_APPLICABLE = {
    r"test_accelerator_state_after_reset": "num_processes is the job's, whatever accelerate's own state has lost",
    r"test_set_epoch_in_batch_sampler": "a batch sampler, refused: batches are cut by elastic-ray",
    r"test_can_pickle_dataloader": "wants accelerate's own loader classes; batches are cut by elastic-ray",
    r"stateful_dataloader": "wants torchdata's loader; AdaptiveDataLoader has state_dict itself",
    r"test_gradient_sync_cpu_multi": "launches processes of its own within a process",
    r"_multiprocess$": "launches processes of its own within a process",
    r"test_gradient_sync_cpu_noop": "gradient_accumulation_steps makes one batch, which the job cuts",
    r"test_accumulation": "gradient_accumulation_steps makes one batch, which the job cuts",
}


def run_own_tests(folder: Path, version: str) -> dict[str, str]:
    """Outcome of each test: passed, failed or skipped."""
    pip = [sys.executable, "-m", "pip"]
    got = subprocess.run(
        [*pip, "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder), f"accelerate=={version}"],
        timeout=180,
    )
    extra = subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--target", str(folder / "extra"), "parameterized"], timeout=120
    )
    if got.returncode or extra.returncode:
        pytest.skip("accelerate's source distribution cannot be had here")
    with tarfile.open(next(folder.glob("accelerate-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"accelerate-{version}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "tests/foreign/suites", folder / "extra"])),
        "HF_HUB_OFFLINE": "1",
        "PYTEST_ADDOPTS": "",
    }
    report = folder / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "accelerate_suite", f"--junitxml={report}"]
        + [f"tests/test_{name}.py" for name in MODULES],
        cwd=source,
        env=environment,
        timeout=700,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = (
            "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        )
    return outcomes


def test_accelerates_own_tests_pass_as_far_as_they_apply(tmp_path: Path) -> None:
    outcomes = run_own_tests(tmp_path, accelerate.__version__)
    named = {name: any(re.search(each, name) for each in NOT_APPLICABLE) for name in outcomes}
    counts = {kind: sum(each == kind for each in outcomes.values()) for kind in ("passed", "failed", "skipped")}
    print(f"accelerate {accelerate.__version__}: {counts}")
    assert counts["passed"] > 60, counts
    assert [name for name, outcome in outcomes.items() if outcome == "failed" and not named[name]] == []
    unneeded = {
        each for each in NOT_APPLICABLE if not any(re.search(each, n) for n, o in outcomes.items() if o != "passed")
    }
    assert not unneeded, "these do pass, or are not there"
