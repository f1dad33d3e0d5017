"""What is kept of a stream: all that some rank may still ask for, and nothing else."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.integrations.ray_data.row_window import Reader, RowSpan, RowWindow


def reader(rank: int, position: int, *, world_size: int = 2, generation: int = 1) -> Reader:
    return Reader(
        client=f"{generation}/{rank}", generation=generation, world_size=world_size, rank=rank, position=position
    )


def window(*sizes: int, floor: int = 0) -> RowWindow:
    made = RowWindow(floor)
    for number, rows in enumerate(sizes):
        made.add(rows, f"block {number}")
    return made


def blocks(made: RowWindow) -> list[Any]:
    return [span.block for span in made.held]


def test_spans_are_those_that_hold_any_of_the_rows() -> None:
    made = window(4, 0, 4, 4)
    assert [(span.first, span.end, span.block) for span in made.spans(3, 8)] == [(0, 4, "block 0"), (4, 8, "block 2")]
    assert made.spans(12, 20) == ()
    assert (made.end, made.ahead(4), made.ahead(5)) == (12, 2, 1)


def test_blocks_go_once_every_rank_is_past_them() -> None:
    made = window(4, 4, 4)
    made.record(reader(0, 9))
    assert len(made.held) == 3, "rank 1 has not asked yet"
    made.record(reader(1, 4))
    assert (blocks(made), made.floor) == (["block 1", "block 2"], 4)


def test_new_group_keeps_what_its_newest_rank_may_need() -> None:
    made = window(4, 4, 4)
    made.record(reader(0, 4))
    made.record(reader(1, 4))
    made.record(reader(0, 8, world_size=3, generation=2))
    made.record(reader(1, 8, world_size=3, generation=2))
    made.record(reader(1, 12))  # of the group before: it has no say
    assert blocks(made) == ["block 1", "block 2"]
    made.record(reader(2, 4, world_size=3, generation=2))
    assert made.floor == 4
    made.record(reader(2, 8, world_size=3, generation=2))
    assert blocks(made) == ["block 2"]


def test_the_last_reader_is_told_that_it_is() -> None:
    made = window(4)
    made.record(reader(0, 0))
    made.record(reader(1, 0))
    assert [made.leave("1/0"), made.leave("1/0"), made.leave("1/1")] == [False, False, True]


def test_a_rank_that_has_left_holds_nothing_back() -> None:
    made = window(4, 4)
    made.record(reader(0, 0))
    made.record(reader(1, 0))
    made.leave("1/0")
    made.record(reader(1, 4))
    assert blocks(made) == ["block 1"]


def test_what_a_restart_skips_is_let_go_at_once() -> None:
    assert blocks(window(4, 4, 4, floor=6)) == ["block 1", "block 2"]


@given(
    sizes=st.lists(st.integers(0, 9), max_size=12),
    moves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=40),
)
def test_no_rank_misses_a_row_and_passed_rows_go(sizes: list[int], moves: list[tuple[int, int]]) -> None:
    made, rows = RowWindow(), list[tuple[int, int]]()
    positions = [0, 0, 0]
    asked = set[int]()
    for step, (rank, advance) in enumerate(moves):
        if step < len(sizes):
            rows += [(step, offset) for offset in range(sizes[step])]
            made.add(sizes[step], step)
        positions[rank] = min(positions[rank] + advance, made.end)
        made.record(reader(rank, positions[rank], world_size=3))
        asked.add(rank)
        for position in positions:
            spans = made.spans(position, made.end)
            found = [(span.block, span.offset + row) for span in spans for row in range(span.rows)]
            assert found[position - spans[0].first if spans else 0 :] == rows[position:]
        if len(asked) == 3:
            assert all(span.end > min(positions) for span in made.held)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_rows_cut_otherwise_by_another_execution_are_used_once(first: list[int], second: list[int]) -> None:
    end, rows = 0, list[int]()
    for sizes in (first, second):
        at = 0
        for size in sizes:
            block = list(range(at, at + size))
            rest = RowSpan(first=at, rows=size, block=block).behind(end)
            if rest is not None:
                rows += rest.block[rest.offset : rest.offset + rest.rows]
                end = rest.end
            at += size
    assert rows == list(range(max(sum(first), sum(second))))
