"""What the README tells people to run is what CI runs, and its example works."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[1]

# Runs the example as a script, with a trainer that is built but does not start, and then its loop alone.
_RUNNER = """
import runpy, sys, types
import torch
import elastic_ray.driver.trainer
from elastic_ray.checkpoints.sharded.saver import write_state
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.state.resume_point import ResumePoint

run = RunStorage(sys.argv[2])
write_state(run, {"model/0": dict(torch.nn.Linear(8, 2).named_parameters())}, ResumePoint(epoch=10, steps=320))
result = types.SimpleNamespace(metrics="built", checkpoint=run.path + "/automatic")
elastic_ray.driver.trainer.ElasticTrainer.fit = lambda self: result
train = runpy.run_path(sys.argv[1], run_name="__main__")["train"]
train({"lr": 0.1})

from elastic_ray.loop.api import current_session
print(current_session().controller.metrics["loss"])
"""


def blocks(language: str) -> list[str]:
    """The README's code blocks in one language."""
    text = (ROOT / "README.md").read_text()
    return [body.strip("\n") for body in re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def test_there_are_two_commands_for_job_and_tests() -> None:
    main_job, tests = blocks("bash")
    assert main_job == 'pip install -c constraints.txt -e ".[examples]" && python examples/digits.py'
    assert tests == 'pip install -c constraints.txt -e ".[test]" && pytest -n 2 --dist loadgroup'


@pytest.mark.parametrize("number", [1, 2])
def test_ci_runs_the_readmes_own_commands(number: int) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\) \{\n.*?^\}$", script, re.MULTILINE | re.DOTALL)
    assert function is not None
    answer = subprocess.run(
        ["bash", "-c", f"{function[0]}\nreadme_command {number}"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert answer.stdout.rstrip("\n") == blocks("bash")[number - 1]
    variable = {1: "main_job", 2: "tests"}[number]
    assert f"{variable}=$(readme_command {number})" in script
    assert f'"${{{variable}%% && *}}"' in script, "the command's installation is not run"
    assert f'"${{{variable}#* && }}"' in script, "what the command installs is not run"


def test_cis_stages_are_all_tests_but_manual_ones() -> None:
    """The README's command and ``.ci/run``'s second stage, which draws new examples for the property tests."""
    script = (ROOT / ".ci" / "run").read_text()
    (second,) = re.findall(r"HYPOTHESIS_NEW_EXAMPLES=1 \$\{tests#\* && \} -m '([^']+)'", script)
    options = (ROOT / "pyproject.toml").read_text()
    first = re.search(r"^addopts = .* -m '([^']+)'", options, re.MULTILINE)
    assert first is not None
    stages = [Expression.compile(each) for each in (first[1], second)]
    for values in itertools.product((False, True), repeat=4):
        marks = dict(zip(("thorough", "hypothesis", "slow", "benchmark"), values, strict=True))
        taken = [stage.evaluate(lambda name, marks=marks, **_: marks[name]) for stage in stages]
        if not marks["benchmark"]:
            assert any(taken) == (not marks["slow"]), marks
            assert not all(taken) or marks["hypothesis"], marks


def test_the_example_is_short_and_runs(tmp_path: Path) -> None:
    (example,) = blocks("python")
    assert len(example.splitlines()) <= 30
    script = tmp_path / "example.py"
    script.write_text(example)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", _RUNNER, str(script), str(tmp_path / "run")],
        check=True,
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
    )
    built, predicted, loss = answer.stdout.split()
    assert built == "built" and predicted in ("tensor([0])", "tensor([1])")
    assert float(loss) < 0.2


def test_files_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
