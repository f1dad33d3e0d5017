"""Scripts that Ray runs: submitted with sizes and arguments, followed, stopped, and listed when they have ended."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.cli.app import cli
from tests.local_cluster import LocalCluster, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
SCRIPT = """
    import argparse, ray.train, elastic_ray as er
    from tests.job import traced

    parser = argparse.ArgumentParser()
    for name in ("trace", "runs"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--raise_at", type=int)
    options = vars(parser.parse_args())
    runs = options.pop("runs")
    result = er.ElasticTrainer(
        traced.train,
        train_loop_config={name: value for name, value in options.items() if value is not None},
        run_config=ray.train.RunConfig(storage_path=runs),
    ).fit()
    print("the script is done")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """With a dashboard, and a Python on its path that has what the script needs."""
    before = dict(os.environ)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(ROOT)
    made = LocalCluster(num_cpus=4, include_dashboard=True, dashboard_agent_listen_port=free_port())
    yield made
    made.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "trace").mkdir()
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "my train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(cluster: Any, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, arguments, env={"RAY_ADDRESS": cluster.address, "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def submit(cluster: Any, script: Path, *options: str, epochs: int, more: tuple[str, ...] = (), code: int = 0) -> Result:
    folder = script.parents[1]
    own = ("--trace", str(folder / "trace"), "--runs", str(folder / "runs"), "--epochs", str(epochs), *more)
    return run(cluster, "submit", str(script), *options, "--", *own, code=code)


def test_script_runs_to_its_end_at_the_commands_size(cluster: Any, script: Path) -> None:
    done = submit(cluster, script, "--workers", "1:2", "--name", "digits", "--wait", epochs=1)
    assert "the script is done" in done.stdout and "job digits: finished" in done.stdout
    assert (script.parents[1] / "runs" / "digits" / "events.jsonl").exists()
    assert "the script is done" in run(cluster, "logs", "digits").stdout
    assert "job digits: finished" in run(cluster, "status", "digits").stdout
    (row,) = json.loads(run(cluster, "jobs", "--all", "--json").stdout)
    assert (row["job"], row["phase"]) == ("digits", "finished")


def test_failing_script_is_exit_code_1_its_name_reusable(cluster: Any, script: Path) -> None:
    wrong = ("--raise_at", "2")
    failed = submit(cluster, script, "--name", "fails", "--workers", "2", "--wait", epochs=1, more=wrong, code=1)
    assert "the user's own mistake" in failed.stdout and "submission fails: failed" in failed.stderr
    run(cluster, "status", "fails", code=1)
    run(cluster, "logs", "fails", "-f", code=1)
    for env in ('{"env_vars": {"A": 1}}', '{"pip": 3}', '{"env_vars": 3}'):  # Ray's TypeErrors
        refused = submit(cluster, script, "--name", "fails", "--runtime-env-json", env, epochs=1, code=1).stderr
        assert "Ray did not accept the submission" in refused and "Traceback" not in refused
    again = json.loads(submit(cluster, script, "--name", "fails", "--json", epochs=100_000).stdout)
    assert again["submission"] == "fails.2"
    deadline = time.monotonic() + 120
    while "rank 0" not in run(cluster, "status", "fails").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert "job fails: stopped" in run(cluster, "stop", "fails").stdout
    assert "the script is done" in run(cluster, "logs", "fails", "-f").stdout


REPLAYED = """
    import sys, time, ray.train, torch, elastic_ray as er

    def train():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        model = er.AdaptiveDataParallel(net, optimizer)
        inputs = torch.randn(96, 3)
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1)), batch_size=24)
        for _ in er.remaining_epochs_until(100_000):
            for x, y in loader:
                time.sleep(0.02)
                optimizer.zero_grad()
                (model(x).squeeze(1) - y).square().mean().backward()
                optimizer.step()

    if __name__ == "__main__":
        run = ray.train.RunConfig(name="named", storage_path=sys.argv[1])
        er.ElasticTrainer(train, run_config=run).fit()
"""


def test_a_submitted_run_is_replayed(cluster: Any, tmp_path: Path) -> None:
    runs, script = tmp_path / "runs", tmp_path / "again.py"
    script.write_text(textwrap.dedent(REPLAYED))
    run(cluster, "submit", str(script), "--workers", "2", "--name", "script", "--", str(runs))
    deadline = time.monotonic() + 120
    while "rank 0" not in run_any(cluster, "status", "named").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    time.sleep(3.0)  # some checkpoints are to be there
    run(cluster, "stop", "named")
    (last,) = [each.steps for each in state_files(RunStorage(str(runs / "named")))][:1]
    events = (runs / "named" / "events.jsonl").read_text()
    found = json.loads(run(cluster, "verify", str(runs / "named"), "--replay", str(last), "--json").stdout)
    (replayed,) = [each for each in found if each["what"] == "replay"]
    assert replayed["proven"] and f"to {last}, trained again, gave the same model" in replayed["text"]
    assert replayed["text"].endswith("(1 worker)")
    assert (runs / "named" / "events.jsonl").read_text() == events, "the run itself is not touched"
    assert not list(runs.glob("named-*"))
    none = run(cluster, "verify", str(runs / "named"), "--replay", str(last + 1), code=1)
    assert "must have an automatic checkpoint at or after it" in none.stderr


def run_any(cluster: Any, *arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"RAY_ADDRESS": cluster.address, "NO_COLOR": "1"})
