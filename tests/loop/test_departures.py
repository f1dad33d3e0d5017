"""A rank of a group without a trainer that leaves early: the others learn which one, and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import elastic_ray as er
from elastic_ray.run.current import session_of_thread
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


class EndsSlowly:
    """Keeps the interpreter's end going while other threads run."""

    def __del__(self) -> None:
        time.sleep(4.0)  # longer than what is under way takes to come back


def leave_with_work_pending(how: str) -> None:
    """Rank 0 ends while a collective waits for rank 1, which goes in the middle of that."""
    model = torch.nn.Linear(1, 1)
    wrapped = er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=8):
            wrapped(x).square().mean().backward()
    if os.environ["RANK"] == "1":
        time.sleep(4.0)  # the other ends meanwhile
        os._exit(0)
    session = session_of_thread()
    assert session is not None and session.group.communicator is not None
    work = session.group.communicator.all_reduce(torch.zeros(1))
    if how == "waits":
        threading.Thread(target=work.wait, daemon=True).start()
    else:
        work.get_future().add_done_callback(lambda _: None)
    sys.ends_slowly = EndsSlowly(), work  # type: ignore[attr-defined]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["waits", "calls_back"])
def test_process_ends_in_order_though_collective_is_under_way(how: str) -> None:
    """Gloo's threads, and one that waits for it, may not come back to an interpreter that is gone."""
    status, errors = run_two(how)
    assert status[0] == 0, errors[0]
    assert "terminate called" not in errors[0]


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
    status, errors = run_two(how)
    assert (status[0] == 0) == (how == "stay"), errors[0]
    assert told in errors[0].splitlines()[-1] if told else "has left" not in errors[0] + errors[1]


def run_two(how: str) -> tuple[list[int], list[str]]:
    """Exit status and errors of two ranks."""
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
    return [process.returncode for process in processes], errors


if __name__ == "__main__":
    how = sys.argv[1]
    (leave_with_work_pending if how in ("waits", "calls_back") else train)(how)
