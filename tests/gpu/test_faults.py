"""Jobs of processes on one device, over NCCL where it is a GPU, that workers join and leave and in which they die."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import compiling, faults

ONCE = ("kill backward", "kill receiving", "kill forming", "stop forward", "cancel forming", "swap")
LONGEST_S = 150.0
SLOW_MACHINE = 10.0  # a busy one of two cores; on a GPU see what the programs beside print


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["all_reduce", "zero2", "fully_shard"])
def test_faults_leave_the_result_as_it_is(device: torch.device, strategy: str) -> None:
    found: dict[str, Any] = faults.run(
        strategy, device.type, list(ONCE), seed=1, until_s=time.monotonic() + LONGEST_S, pace_s=0.05
    )
    assert not found["hangs"] and not found["error"], (found["hangs"], found["error"], found["log"][-30:])
    assert len(found["faults"]) >= 3, "the machine is too slow to tell"
    assert max(each["next_s"] for each in found["faults"]) < SLOW_MACHINE
    assert found["over_nccl"] == [device.type == "cuda"]
    epochs = found["steps"] * faults.BATCH // len(faults.data())
    wanted = faults.alone("all_reduce", device.type, epochs)
    assert found["ranks_apart"] == 0.0
    assert faults.apart(found["result"]["weights"], wanted["weights"]) < faults.CLOSE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_joiner_finds_what_its_node_has_compiled(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cold, joiner = compiling.first_steps(device.type)
    assert cold[compiling.MISSES] > 0 and joiner[compiling.MISSES] == 0 and joiner[compiling.HITS] > 0
    assert joiner["first_s"] <= cold["first_s"] / 2, (cold, joiner)
