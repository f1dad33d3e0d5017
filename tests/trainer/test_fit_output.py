"""What ``fit()`` prints, with all that Ray adds from other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, ray, ray.train, torch, elastic_ray as er
from elastic_ray.loop.api import current_epoch

def train(config):
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, loader = er.AdaptiveDataParallel(model, optimizer), er.AdaptiveDataLoader(data, batch_size=16)
    for _ in er.remaining_epochs_until(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
        killed = os.path.exists(config["folder"] + "/killed")
        if er.get_context().get_world_rank() == 1 and current_epoch() == 1 and not killed:
            open(config["folder"] + "/killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        er.report({"accuracy": 0.5, "loss": loss.item(), "\\x1b[31m": 1.0})
    raise ValueError("\\x1b[2Jfailed\\u202e")

ray.init(address="local", num_cpus=2, include_dashboard=False)
run = ray.train.RunConfig(name="shown", storage_path=sys.argv[1])
size = ray.train.ScalingConfig(num_workers=(1, 2))
er.ElasticTrainer(train, train_loop_config={"folder": sys.argv[1]}, scaling_config=size, run_config=run).fit()
"""


@pytest.mark.slow
def test_events_come_once_and_each_epoch_with_its_loss(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 1 and "TrainFunctionError" in answer.stderr, answer.stderr
    both = answer.stdout + answer.stderr
    assert len([line for line in both.splitlines() if "0 -> 2 workers" in line and "pause" not in line]) == 1, both
    assert "A worker died or was killed" not in both, "Ray's account of the worker that was lost"
    assert "0->2 workers" not in both, both
    done = [line for line in lines if " done, " in line]
    assert [line.partition(", loss ")[0] for line in done] == [f"job shown: epoch {n}/3 done" for n in (1, 2, 3)], done
    assert all(", accuracy 0.5, \\x1b[31m 1" in line for line in done), done
    (last,) = [line for line in lines if line.startswith("job shown: failed")]
    assert f"job shown: results in {tmp_path}/shown" in lines[-3:], lines
    assert "\\x1b[2Jfailed\\u202e" in last and "\x1b[2J" not in answer.stdout
