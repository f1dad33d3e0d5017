"""A loader's worker process lets go in silence of what came along of other loaders in the memory it was forked from."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import gc
import torch
import elastic_ray as er

class Letting(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        others.clear()
        gc.collect()
        return index

others = [iter(torch.utils.data.DataLoader(list(range(4)), num_workers=1, multiprocessing_context="fork"))]
loader = er.AdaptiveDataLoader(Letting(), batch_size=2, num_workers=1, multiprocessing_context="fork")
for _ in er.remaining_epochs_until(1):
    seen = [int(index) for batch in loader for index in batch]
print(sorted(seen), [int(index) for index in others[0]])
"""


@pytest.mark.thorough
def test_nothing_is_said_of_them() -> None:
    run = [sys.executable, "-c", _SCRIPT]
    answer = subprocess.run(run, check=True, capture_output=True, text=True, timeout=300)
    assert answer.stdout == "[0, 1, 2, 3] [0, 1, 2, 3]\n"
    assert "child process" not in answer.stderr
