"""Stragglers of runs without a trainer: reported and relieved when asked for; nobody can be put in their place."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.loop.api import current_session
from tests.loop.ranks import Ranks

SAMPLES, BATCH, SLOW, SAMPLE_S = 240, 24, 1, 0.002
EPOCHS = 14  # steps of 50 ms, of which those of a quarter of a second are looked at together

Seen = tuple[list[int], list[list[int]], list[str]]


def loop(response: str | None, epochs: int, worker_rank: int) -> Seen:
    """Train with rank 1 three times slower; own batch sizes, what was drawn by epoch, and what was logged."""
    torch.manual_seed(0)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("elastic_ray")
    logger.addHandler(handler)
    generator = torch.Generator().manual_seed(2)
    rows = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES))
    model: Any = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer, stragglers=response)
    loader = er.AdaptiveDataLoader(rows, batch_size=BATCH, seed=3)
    sizes, drawn = [], []
    for _ in er.remaining_epochs_until(epochs):
        drawn.append([])
        for x, index in loader:
            sizes.append(len(x))
            drawn[-1] += index.tolist()
            time.sleep(SAMPLE_S * len(x) * (3.0 if worker_rank == SLOW else 1.0))  # what a sample costs on this worker
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    logger.removeHandler(handler)
    return sizes, drawn, logged


def trained(response: str | None) -> Seen:
    return loop(response, EPOCHS, int(os.environ["RANK"]))


def measures(response: str | None) -> bool:
    loop(response, 1, 0)
    return current_session().registry.monitoring.meter.on


@pytest.mark.thorough
def test_shares_follow_slow_rank_and_rank_0_logs_it(ranks: Ranks) -> None:
    results: list[Seen] = ranks.run(trained, "share", world=3)
    for epoch in range(EPOCHS):
        assert sorted(index for _, drawn, _ in results for index in drawn[epoch]) == list(range(SAMPLES))
    at_end = [sizes[-20:] for sizes, _, _ in results]
    assert {sizes[0] for sizes, _, _ in results} == {BATCH // 3}
    assert max(at_end[SLOW]) < BATCH // 3 < min(at_end[0] + at_end[2])
    assert {sum(step) for step in zip(*at_end, strict=True)} == {BATCH}
    logged = [each for each in results[0][2] if "worker 1" in each]
    assert "takes" in logged[0] and "as long as the others" in logged[0] and "samples in a step" in logged[1]
    assert not any("worker 1" in each for _, _, said in results[1:] for each in said)


@pytest.mark.thorough
def test_told_of_only_and_not_looked_for_unless_asked(ranks: Ranks) -> None:
    results: list[Seen] = ranks.run(trained, "tell", world=2)
    assert [sum("as long as the others" in each for each in said) for _, _, said in results] == [1, 0]
    assert {size for sizes, _, _ in results for size in sizes} == {BATCH // 2}
    assert ranks.run(measures, None, world=2) == [False, False]


def test_responses_impossible_without_a_trainer_are_refused_by_name() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"stragglers must be .* got 'replace': the group .* is fixed"):
        er.AdaptiveDataParallel(model, optimizer, stragglers="replace")
    with pytest.raises(ValueError, match="stragglers must be 'ignore', 'tell' or 'share', or None, but got 'shares'"):
        er.AdaptiveDataParallel(model, optimizer, stragglers="shares")


SCRIPT = """
import logging, os
from tests.loop.test_standalone_stragglers import EPOCHS, loop
logging.basicConfig()
sizes, _, logged = loop("share", EPOCHS, int(os.environ["RANK"]))
print("DONE", os.environ["RANK"], max(sizes[-20:]), min(sizes[-20:]), len([e for e in logged if "worker 1" in e]))
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script)], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("DONE")]
    told = {int(rank): (int(most), int(least), int(count)) for rank, most, least, count in lines}
    assert told[1][0] < BATCH // 3 < min(told[0][1], told[2][1])
    assert told[0][2] >= 2 and told[1][2] == told[2][2] == 0
    assert "worker 1 takes" in done.stderr, "the event is in the log"
