"""The device that these tests run on."""

from __future__ import annotations

import os

import pytest
import torch

VARIABLE = "ELASTIC_RAY_TEST_DEVICE"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU, or what the environment names in its place; without either the test is skipped before a cluster starts."""
    named = os.environ.get(VARIABLE, "cuda")
    if named not in ("cuda", "cpu"):
        raise ValueError(f"{VARIABLE} must be cuda or cpu, but got {named!r}")
    if named == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"torch sees no GPU; {VARIABLE}=cpu runs this test without one")
    return torch.device(named)
