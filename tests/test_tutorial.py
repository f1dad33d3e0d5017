"""The tutorial from its first line to its last, commands included, with nothing but the repository."""

from __future__ import annotations

import contextvars
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.local_cluster import LocalCluster

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run_command(command: str, folder: Path, address: str) -> None:
    """Run one as a shell does, with this process's Python."""
    programs = {"python": f"{sys.executable}", "elastic-ray": f"{sys.executable} -m elastic_ray.cli"}
    program, _, arguments = command.partition(" ")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}
    subprocess.run(f"{programs[program]} {arguments}", shell=True, check=True, cwd=folder, env=environment, timeout=300)


@pytest.mark.thorough
@pytest.mark.timeout(1000)
def test_tutorial_runs_from_its_first_line_to_its_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no file of the repository is at hand
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ELASTIC_RAY_POOL", "per_node=3,memory_share=0.5")
    cluster = LocalCluster(num_cpus=3)
    try:
        script = contextvars.Context()  # a process of its own to elastic_ray: its epochs begin at 0
        names: dict[str, Any] = {"__name__": "page"}
        for language, block in BLOCKS:
            if language == "python":
                line = PAGE.read_text().partition(block)[0].count("\n")
                script.run(exec, compile("\n" * line + block, PAGE.name, "exec"), names)
                if block.startswith("def newest_first"):
                    (tmp_path / "policy.py").write_text(block)
                continue
            for command in block.replace("\\\n", " ").strip().splitlines():
                if not command.startswith("pip install "):
                    run_command(command, tmp_path, cluster.address)
    finally:
        cluster.shutdown()


def test_page_has_commands_and_policy_to_put_into_file() -> None:
    assert [language for language, _ in BLOCKS].count("sh") == 2
    assert any(block.startswith("def newest_first") for _, block in BLOCKS)
