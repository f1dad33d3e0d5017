"""Foreign programs, alone and on two ranks that end with the same weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.loop import foreign
from tests.loop.ranks import Ranks


def on(ranks: Ranks, world: int | None, program: Any, epochs: int) -> list[dict[str, Any]]:
    """What each rank returns; all have the same weights."""
    found = ranks.run(program, {"epochs": epochs}, world=world)
    results = [found] if world is None else found
    assert all(result["weights"] == results[0]["weights"] for result in results)
    return list(results)


@pytest.mark.parametrize("world", [None, 2])
def test_collaborative_filtering_with_drawn_negatives(ranks: Ranks, world: int | None) -> None:
    for result in on(ranks, world, foreign.ncf, 2):
        positives = foreign.USERS * 6
        assert result["rounds"] == [(positives * (1 + foreign.NEGATIVES), positives)] * 2
        assert [users for users, _, _ in result["lists"]] == [foreign.USERS] * 2
        assert all(0 <= ndcg <= hits <= foreign.USERS for _, hits, ndcg in result["lists"])


@pytest.mark.parametrize("world", [None, 2])
def test_a_recurrent_state_goes_on(ranks: Ranks, world: int | None) -> None:
    results = on(ranks, world, foreign.language, 4)
    assert sum(result["carried"] for result in results) == 4 * foreign.STREAMS * (foreign.CHUNKS - 1)
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert result["losses"][-1] < 0.5 * result["losses"][0]


@pytest.mark.parametrize("world", [None, 2])
def test_folds_of_an_averaged_model(ranks: Ranks, world: int | None) -> None:
    for result in on(ranks, world, foreign.averaged_folds, 3):
        assert result["samples"] == [60.0] * 9
        assert result["moved"] == [True] * 3
        assert min(result["accuracies"].values()) > 0.6
