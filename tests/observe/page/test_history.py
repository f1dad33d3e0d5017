"""The allocation over time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.observe.page.history import History

PLACES = st.lists(
    st.tuples(st.sampled_from("ab"), st.dictionaries(st.sampled_from("xyz"), st.integers(1, 4))), max_size=30
)


@given(PLACES)
def test_bars_say_at_every_moment_what_was_placed(places: list[tuple[str, dict[str, int]]]) -> None:
    history, now = History(), dict[str, dict[str, int]]()
    expected: list[dict[tuple[str, str], int]] = []
    for time_s, (job, nodes) in enumerate(places):
        history.place(float(time_s), job, nodes, time_s)
        now[job] = nodes
        expected.append({(node, each): slots for each, own in now.items() for node, slots in own.items()})
    for time_s, want in enumerate(expected):
        found = {
            (node, job): slots
            for _, node, job, from_s, to_s, slots, _ in history.bars
            if from_s <= time_s and (to_s is None or time_s < to_s)
        }
        assert found == want
    assert history.slots == sum(slots for own in now.values() for slots in own.values())
    assert len({bar[0] for bar in history.bars}) == len(history.bars)


def test_what_does_not_change_goes_on_as_one_bar() -> None:
    history = History()
    history.place(1.0, "a", {"x": 2, "y": 1}, 1)
    history.place(2.0, "a", {"x": 2}, 2)
    history.place(3.0, "a", {"x": 2}, 3)
    assert [(bar[1], bar[3], bar[4], bar[6]) for bar in history.bars] == [("y", 1.0, 2.0, 1), ("x", 1.0, None, 1)]
    history.end(4.0, {"a"})
    assert history.jobs == frozenset() and [bar[4] for bar in history.bars] == [2.0, 4.0]


def test_long_time_is_bounded_and_the_oldest_goes_first() -> None:
    history = History(most_bars=10)
    for n in range(100):
        history.place(float(n), "a", {"x": 1 + n % 2}, n)
        history.mark(float(n), "a", "resize", "")
        history.measure(float(n), n, 0, None)
        history.measure(float(n) + 0.5, n, 0, None)
    assert [bar[3] for bar in history.bars] == [float(n) for n in range(89, 100)]
    assert len(history.use) == 100 and history.use[-1] == (99.0, 99, 0, None)
