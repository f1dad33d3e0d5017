"""What is central stays as it is while jobs come, go and report: a small version of ``bench_scale.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_scale.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["jobs", "cycles", "wide", "reports"])
def test_memory_and_cpu_are_flat(part: str) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--parts", part]
    run = subprocess.run(command, check=False, timeout=500, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"benchmark"')]
    assert len(results) == 1 and results[0]["rows"]
    grown = [each for each in results[0]["bars"] if "growth" in each["claim"] and not each["met"]]
    assert not grown, grown
