"""Which epoch a train function begins with that counts its epochs by itself."""

from __future__ import annotations

import pytest

from elastic_ray.state.resume_point import StartingPoint


def test_it_begins_at_the_start_or_after_its_checkpoint() -> None:
    assert StartingPoint().first_epoch() == 0
    start = StartingPoint("c", epoch=4, others_at=9)
    assert (start.first_epoch(), start.epochs_behind) == (0, 9)
    assert start.claim_checkpoint() == "c"
    assert (start.first_epoch(), start.epochs_behind) == (4, 5)


def test_one_that_starts_with_the_others_is_not_behind() -> None:
    start = StartingPoint("c", epoch=4)
    start.claim_checkpoint()
    assert start.epochs_behind == 0


def test_job_with_only_a_checkpoint_must_ask_for_it() -> None:
    with pytest.raises(RuntimeError, match=r"continues from c, .*get_checkpoint\(\)"):
        StartingPoint("c", epoch=4).first_epoch()
    assert StartingPoint("c", epoch=4, has_state=True).first_epoch() == 0, "there is an automatic checkpoint"
