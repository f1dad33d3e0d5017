"""What a loop sees of its group: equal buffers, the context, and one file alone or under torchrun."""

from __future__ import annotations

import _thread
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.loop.api import current_epoch
from elastic_ray.run.current import set_session, set_worker_session
from tests.loop.alone import session_of
from tests.loop.ranks import Ranks
from tests.loop.trainee import numbers


def normalised(_: int) -> list[dict[str, torch.Tensor]]:
    """BatchNorm's buffers before, between and after three epochs, the second left by break."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(numbers(32), batch_size=8)
    found = []
    for epoch in er.remaining_epochs_until(3):
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x.float()[:, None]).square().mean().backward()
            optimizer.step()
            if epoch == 1:
                break
    found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    return found


@pytest.mark.thorough
def test_buffers_are_equal_after_each_epoch(ranks: Ranks) -> None:
    first, second = ranks.run(normalised, 0, world=2)
    for mine, theirs in zip(first[1:], second[1:], strict=True):
        assert mine["1.running_mean"].abs().sum() > 0
        for name, buffer in mine.items():
            assert torch.equal(buffer, theirs[name]), name


def contexts(_: int) -> tuple[Any, ...]:
    """What the context says within an epoch."""
    loader = er.AdaptiveDataLoader(numbers(8), batch_size=4)
    found: tuple[Any, ...] = ()
    for _epoch in er.remaining_epochs_until(1):
        for _batch in loader:
            c = er.get_context()
            found = (
                c.get_world_size(),
                c.get_world_rank(),
                c.get_local_rank(),
                c.get_local_world_size(),
                c.get_node_rank(),
                current_epoch(),
            )
    return found


def test_the_context_tells_the_group(ranks: Ranks) -> None:
    assert ranks.run(contexts, 0) == (1, 0, 0, 1, 0, 0)
    assert ranks.run(contexts, 0, world=2) == [(2, 0, 0, 2, 0, 0), (2, 1, 1, 2, 0, 0)]


SCRIPT = """
import os, torch, elastic_ray as er
from torch import nn
data = torch.utils.data.TensorDataset(torch.arange(12.0)[:, None])
torch.manual_seed(0)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model = er.AdaptiveDataParallel(model, optimizer)
loader = er.AdaptiveDataLoader(data, batch_size=6)
for epoch in er.remaining_epochs_until(2):
    totals = er.Accumulator()
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        totals["sum"] += x.sum().item()
line = f"DONE {er.get_context().get_world_size()} {totals['sum']} {model.module.weight.item():.6f}\\n"
os.write(1, line.encode())  # in one piece: the ranks share one pipe
"""


@pytest.mark.slow
def test_one_file_runs_alone_and_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = []
    for arguments in ([], torchrun):
        done = subprocess.run(
            [sys.executable, *arguments, str(script)], env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        printed.append([line.split() for line in done.stdout.splitlines() if line.startswith("DONE")])
    assert len(printed[0]) == 1
    assert [line[1] for line in printed[0] + printed[1]] == ["1", "2", "2"]
    assert {tuple(line[2:]) for line in printed[0] + printed[1]} == {("66.0", printed[0][0][3])}


def in_thread(function: Callable[[], Any]) -> list[Any]:
    """What it gave, or raised, in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=run, name="mine")
    thread.start()
    thread.join(30.0)
    return found


def test_another_thread_of_a_worker_is_no_own_run() -> None:
    """What it reports would be lost, and what it reduces be its own value only."""
    session = session_of()
    set_worker_session(session)
    try:
        for call in (lambda: er.report({"loss": 1.0}), lambda: er.all_reduce(1), er.get_context):
            (said,) = in_thread(call)
            assert "called in thread 'mine', which does not belong to the job" in said
        context = contextvars.copy_context()
        assert in_thread(lambda: context.run(er.get_context)) == [er.get_context()]
    finally:
        set_worker_session(None)
    assert in_thread(lambda: er.get_context().get_world_size()) == [1], "without a trainer any thread may train"


@pytest.mark.parametrize("in_worker", [True, False])
def test_thread_of_torchs_backward_pass_belongs_to_the_run(in_worker: bool) -> None:
    """As those are in which it works on a GPU, that know nothing of the thread that has called ``backward()``.

    One that user code has started is none of these.
    """

    def backward() -> list[Any]:
        x, seen = torch.ones(1, requires_grad=True), list[Any]()
        y = x * 2
        y.register_hook(lambda grad: seen.append(er.get_context()))
        y.backward()
        return seen

    found: list[Any] = []
    done = threading.Event()

    def run() -> None:
        found.extend(backward())
        done.set()

    session = session_of()
    (set_worker_session if in_worker else set_session)(session)
    try:
        _thread.start_new_thread(run, ())  # one that Python's threading does not know, as torch's own
        assert done.wait(30.0) and found == [er.get_context()]
        (other,) = in_thread(backward)
        assert "does not belong to the job" in other if in_worker else other != found
    finally:
        set_worker_session(None)
