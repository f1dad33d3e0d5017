"""A page's connections: who waits goes, and who is being answered stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.observe.page.gate import LONGEST_WAIT_S, Doors

steps = st.lists(
    st.tuples(st.sampled_from(["open", "open", "close", "begin", "end"]), st.integers(0, 30)), max_size=120
)


@given(steps)
def test_there_are_never_too_many_and_answered_ones_stay(steps: list[tuple[str, int]]) -> None:
    doors, peers, asking = Doors(most=8, most_of_one=5), dict[int, str](), set[int]()
    for now, (what, number) in enumerate(steps):
        if what == "open" and number not in peers:
            peers[number] = f"peer {number % 3}"
            gone = doors.open(number, peers[number], float(now))
            assert gone not in asking
            if gone is not None:
                del peers[gone]
        elif what == "close":
            doors.close(number)
            peers.pop(number, None)
            asking.discard(number)
        elif what == "begin" and number in peers and number not in asking:
            doors.start(number)
            asking.add(number)
        elif what == "end" and number in asking:
            doors.end(number, float(now))
            asking.discard(number)
        assert len(doors) == len(peers) <= 8
        assert all(list(peers.values()).count(peer) <= 5 for peer in peers.values())
        late = doors.late(now + LONGEST_WAIT_S)
        assert not asking & set(late) and set(late) == peers.keys() - asking
