"""A rank of a group without a trainer that leaves early: the others learn which one, and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elastic_ray as er
from tests.loop.ports import free_port


def train(how: str) -> None:
    """Three steps, but rank 1 leaves before its last one."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(24, 1)), batch_size=8)
    for _ in er.remaining_epochs_until(1):
        for number, (x,) in enumerate(loader):
            if number == 2 and os.environ["RANK"] == "1":
                match how:
                    case "return":
                        return
                    case "raise":
                        raise KeyError("the user's own mistake")
                    case "die":
                        os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("return", "rank 1 has left: its process ends. Every rank must make the same calls"),
        ("raise", """rank 1 has left: its process ends with KeyError: "the user's own mistake\""""),
        ("die", "rank 1 has left without a word: its process was killed"),
        ("stay", ""),
    ],
)
def test_the_others_are_told_which_rank_has_left(how: str, told: str) -> None:
    port = free_port()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.loop.test_departures", how],
            cwd=Path(__file__).parents[2],
            env=plain | group | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert (processes[0].returncode == 0) == (how == "stay"), errors[0]
    assert told in errors[0].splitlines()[-1] if told else "has left" not in errors[0] + errors[1]


if __name__ == "__main__":
    train(sys.argv[1])
