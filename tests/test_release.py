"""The release script: its stages, and what it takes from other files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "release"


def shell(lines: str) -> str:
    """Return the output of lines that may use the script's function."""
    (function,) = re.findall(r"^first_python_block\(\) .*$", SCRIPT.read_text(), re.MULTILINE)
    text = f"{function}\n{lines}"
    return subprocess.run(["bash", "-c", text], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_an_unknown_stage_is_answered_with_the_known() -> None:
    answer = subprocess.run([SCRIPT, "whee"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "'whee'; there are versions slow benchmarks measurements wheel" in answer.stderr


def test_each_extra_is_resolved_and_each_example_found() -> None:
    (pattern,) = re.findall(r"for extra in \$\((sed .* pyproject.toml)\)", SCRIPT.read_text())
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    assert shell(pattern).split() == re.findall(r"^([\w-]+) = \[", table, re.MULTILINE)
    assert "er.ElasticTrainer(" in shell("first_python_block README.md")
    assert "ElasticRayStrategy()" in shell("first_python_block docs/lightning.md")
