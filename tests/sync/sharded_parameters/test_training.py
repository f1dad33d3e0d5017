"""A sharded model is trained as a whole one, by any number of workers."""

from __future__ import annotations

import pytest

from tests.sync.sharded_parameters.sharded import Case, check


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_training_is_that_of_a_whole_model(workers: int) -> None:
    check(Case(), [], tuple(range(1, workers + 1)))
