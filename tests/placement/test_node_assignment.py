"""Who is where: conservation, staying, and whole nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.policies.goodput.node_assignment import assign_nodes, grow_in_place


@st.composite
def rooms(draw: st.DrawFn) -> tuple[list[int], list[int], list[dict[int, int]]]:
    slots = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    left, sizes = sum(slots), []
    while left and len(sizes) < 8 and draw(st.booleans()):
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    free = list(slots)
    present = []
    for _ in sizes:
        here = {}
        for i in range(len(slots)):
            workers = draw(st.integers(0, free[i]))
            if workers and draw(st.booleans()):
                here[i] = workers
                free[i] -= workers
        present.append(here)
    return slots, sizes, present


@settings(max_examples=200, deadline=None)
@given(room=rooms())
def test_everybody_sits_and_no_node_is_overfull(room: tuple[list[int], list[int], list[dict[int, int]]]) -> None:
    slots, sizes, present = room
    places = assign_nodes(np.array(slots), sizes, present)
    assert [sum(place.values()) for place in places] == sizes
    used = np.zeros(len(slots), dtype=int)
    for place in places:
        for node, workers in place.items():
            assert workers > 0
            used[node] += workers
    assert (used <= slots).all()


@settings(max_examples=100, deadline=None)
@given(room=rooms())
def test_the_same_sizes_again_move_nobody(room: tuple[list[int], list[int], list[dict[int, int]]]) -> None:
    slots, sizes, present = room
    places = assign_nodes(np.array(slots), sizes, present)
    assert assign_nodes(np.array(slots), sizes, places) == places


def test_powers_of_two_never_straddle_nodes() -> None:
    rng = np.random.default_rng(0)
    present: list[dict[int, int]] = []
    sizes: list[int] = []
    for _ in range(200):
        left, sizes = 32, []
        while left:
            sizes.append(min(left, int(rng.choice([1, 2, 4, 8]))))
            if sizes[-1] not in (1, 2, 4, 8):
                sizes[-1] = 1
            left -= sizes[-1]
        present = (present + [{}] * len(sizes))[: len(sizes)]
        present = assign_nodes(np.full(8, 4), sizes, present)
        assert all(len(place) == max(1, size // 4) for place, size in zip(present, sizes, strict=True)), present


def test_a_shrinking_job_keeps_its_fullest_nodes() -> None:
    assert assign_nodes(np.array([4, 4]), [4], [{0: 2, 1: 4}]) == [{1: 4}]


def test_small_jobs_make_room_for_a_whole_node() -> None:
    places = assign_nodes(np.array([4, 4]), [1, 1, 4], [{0: 1}, {1: 1}, {}])
    assert len(places[2]) == 1


@pytest.mark.parametrize(
    ("slots", "sizes", "present", "expected"),
    [
        ([4, 4], [6], [{0: 4, 1: 3}], [{0: 4, 1: 2}]),  # one that shrinks keeps its fullest nodes
        ([4, 4], [6], [{1: 4, 0: 1}], [{1: 4, 0: 2}]),  # and one that grows fills its fullest first
        ([4, 4], [1, 4], [{}, {}], [{1: 1}, {0: 4}]),  # the largest chooses first
        ([2, 4], [4, 2], [{}, {1: 2}], [{1: 4}, {0: 2}]),  # half as large is small enough to be moved
        ([4, 4], [4, 3, 1], [{}, {0: 3}, {1: 1}], [{1: 4}, {0: 3}, {0: 1}]),
        ([4, 4], [4, 1, 2], [{}, {0: 1}, {1: 2}], [{0: 4}, {1: 1}, {1: 2}]),  # the fewest workers are moved
        ([4, 4, 4, 2], [1, 9, 2], [{1: 3}, {}, {1: 1, 0: 1}], [{1: 1}, {2: 4, 0: 4, 3: 1}, {1: 2}]),
        ([4, 2], [0, 2], [{0: 1}, {0: 2}], [{}, {0: 2}]),  # whom nothing is given leaves
    ],
)
def test_places_worked_out_by_hand(slots: list[int], sizes: list[int], present: Any, expected: Any) -> None:
    assert assign_nodes(np.array(slots), sizes, present) == expected


def test_growth_in_place_moves_nobody_and_takes_own_nodes() -> None:
    slots = np.array([4, 4, 4, 4])
    present = [{0: 2, 1: 4}, {2: 2}, {3: 3}]
    assert grow_in_place(slots, [9, 2, 3], present) == [{0: 4, 1: 4, 2: 1}, {2: 2}, {3: 3}]
    assert grow_in_place(slots, [99, 1, 3], present) == [{0: 4, 1: 4, 2: 2, 3: 1}, {2: 2}, {3: 3}]
    assert grow_in_place(slots, [6, 3, 3, 2], [*present, {}]) == [{0: 2, 1: 4}, {2: 3}, {3: 3}, {0: 2}]
