"""The examples, run as people run them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, timeout_s: float) -> str:
    """Standard output of a command that must succeed, without what the test session has set for its own Ray."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = str(ROOT)
    answer = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


# What a smoke run must print.
SMOKE = {
    "adaptation.py": r"(?s)asked +WarmUp.before_train.*SetBatch\(batch_size=32\).*[1-9] requests applied",
    "digits.py": r"every job must reach 0\.5: yes",
    "digits_loop.py": r"accuracy 0\.\d+ on the held-out digits",
    "custom_policy.py": r"decided by least_left_first",
    "autoscaling.py": r"large +last epoch 0, 512 samples in it",
    "gpt_sharded.py": r"(?s)-> 4 workers.*kill -9.*loss on held-out text: \d\.\d+; undisturbed \d\.\d+: the same",
    "gpt_tokens.py": r"(?s)seesaw +0 +512 -> \d+ .*good enough: yes",
    "huggingface_text.py": r"good enough: yes",
    "llama_units.py": r"(?s)-> 3 units.*kill -9.*loss on held-out text: \d\.\d+; undisturbed \d\.\d+: the same",
    "lightning_digits.py": r"good enough: yes",
    "recommender.py": r"(?s)considered .* x plain DDP; accuracy 0\.\d+",
    "ray_data_parquet.py": r"good enough: yes",
    "torchtrainer_unchanged.py": r"good enough: yes",
    "tune_digits.py": r"best configuration: .*accuracy 0\.\d+",
    "nni_digits.py": r"best configuration: .*accuracy 0\.\d+",
}

# Packages that may be missing, and the extra that has them.
NEEDS = {
    "nni_digits.py": ("nni", "nni"),
    "lightning_digits.py": ("lightning", "lightning"),
    "huggingface_text.py": ("transformers", "huggingface"),
    "ray_data_parquet.py": ("pyarrow", "ray-data"),
}

# CI runs digits.py in full, as the main job; the others wait for nodes, or train for more than 25 s.
SLOW = {
    "adaptation.py",
    "autoscaling.py",
    "custom_policy.py",
    "digits.py",
    "gpt_sharded.py",
    "gpt_tokens.py",
    "huggingface_text.py",
    "lightning_digits.py",
    "llama_units.py",
    "ray_data_parquet.py",
    "recommender.py",
    "torchtrainer_unchanged.py",
    "tune_digits.py",
}


@pytest.mark.matrix(every=1)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "example",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(SMOKE)],
)
def test_smoke_run_takes_seconds_and_does_what_example_does(example: str) -> None:
    needs, extra = NEEDS.get(example, ("torch", ""))
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: pip install -e '.[{extra}]'")
    output = run(sys.executable, f"examples/{example}", "--smoke", timeout_s=900)
    assert re.search(SMOKE[example], output), output


def test_every_example_has_a_smoke_run_or_needs_none() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*SMOKE, "plot_sizes.py", "watched_job.py"}


def test_the_events_of_jobs_are_drawn(tmp_path: Path) -> None:
    for job, sizes in {"a": (0, 2, 1), "b": (0, 1)}.items():
        (tmp_path / job).mkdir()
        events = [
            {"kind": kind, "time_s": 10.0 * i, "from_workers": 0, "to_workers": size, "reason": "a test"}
            for i, (size, kind) in enumerate(
                zip((*sizes, 0), ("started", "resize", "failure", "finished"), strict=False)
            )
        ]
        (tmp_path / job / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    picture = tmp_path / "sizes.png"
    run(sys.executable, "examples/plot_sizes.py", str(tmp_path), str(picture), timeout_s=60)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_three_jobs_share_a_cluster_through_two_kills() -> None:
    output = run(sys.executable, "examples/digits.py", timeout_s=900)
    accuracies = [float(value) for value in re.findall(r"\d s +(0\.\d{3})  ", output)]
    assert len(accuracies) == 3, output
    assert min(accuracies) >= 0.95
    assert output.count("kill -9") == 2 and "recovered" in output
    assert re.search(r"[1-3] -> [2-4] workers, paused", output), "no job has grown"
    assert "raylet" not in output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]])
def test_the_loop_runs_alone_and_under_torchrun(launcher: list[str]) -> None:
    output = run(sys.executable, *launcher, "examples/digits_loop.py", timeout_s=300)
    assert len(output.splitlines()) == 1
    match = re.match(r"accuracy (0\.\d+) on the held-out digits", output)
    assert match is not None, output
    assert float(match[1]) >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_policy_of_ones_own_moves_the_sizes() -> None:
    output = run(sys.executable, "examples/custom_policy.py", timeout_s=300)
    sizes = re.findall(r"workers: (.*)", output)
    assert "long 4" in sizes, output
    assert any(re.fullmatch(r"long [12], short [23]", size) for size in sizes), "the shorter one comes first"
    assert sizes.index("long 4, short 0") < len(sizes) - 1 and "after 12 epochs" in output, "all slots again"
    assert "decided by least_left_first" in output


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_sweep_of_elastic_trials_beside_another_job() -> None:
    output = run(sys.executable, "examples/tune_digits.py", timeout_s=900)
    assert len(re.findall(r"^\d+ +0\.\d+ ", output, re.MULTILINE)) == 12, output
    best = re.search(r"best configuration: \{'lr'.*accuracy (0\.\d+)", output)
    assert best is not None and float(best[1]) >= 0.9, output
    assert re.search(r"^neighbour: accuracy 0\.9", output, re.MULTILINE), output
    assert int(re.search(r"changed size (\d+) times", output)[1]) >= 1, "sizes have moved"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_nodes_come_and_go_and_every_job_ends_whole() -> None:
    output = run(sys.executable, "examples/autoscaling.py", timeout_s=900)
    whole = re.findall(r"^\w+ +last epoch \d+, 512 samples in it, .* cost (\d+\.\d+) cents$", output, re.MULTILINE)
    assert len(whole) == 3 and all(float(cost) > 0 for cost in whole), output
    assert "is gone without notice" in output, output


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(importlib.util.find_spec("nni") is None, reason="NNI is not installed: pip install -e '.[nni]'")
def test_an_nni_experiment_beside_an_ordinary_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"TRIALS": "8", "PORT": "0", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    output = run(sys.executable, "examples/nni_digits.py", timeout_s=900)
    assert len(re.findall(r"^\d +\d\.\d{4} .* (?:SUCCEEDED|EARLY_STOPPED) ", output, re.MULTILINE)) == 8, output
    best = re.search(r"best configuration: .*, accuracy (0\.\d+)", output)
    assert best is not None and float(best[1]) >= 0.9, output
    moved = re.search(r"8 trials in \d+ s; trials changed size (\d+) times", output)
    assert moved is not None and int(moved[1]) > 0, output
