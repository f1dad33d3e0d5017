"""Ranks that workers are told before they have joined."""

from __future__ import annotations

from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.worker_group.failure_detector import ExpectedRanks


def started(
    ranks: ExpectedRanks, *workers: str, living: dict[str, str], spec: GenerationSpec | None = None
) -> list[int]:
    """Ranks that they are told, one after the other."""
    return [ranks.of(worker, living, spec, 3).rank for worker in workers]


def test_exactly_one_of_those_starting_job_sees_rank_0() -> None:
    ranks, living = ExpectedRanks(), {"w1": "a", "w2": "a", "w3": "b"}
    found = [ranks.of(worker, living, None, 3) for worker in ("w2", "w1", "w3")]
    assert [place.rank for place in found] == [0, 1, 2]
    assert [place.world_size for place in found] == [3, 3, 3]
    assert [(place.local_rank, place.local_world_size) for place in found] == [(0, 2), (1, 2), (0, 1)]
    assert [place.node_rank for place in found] == [0, 0, 1]


def test_who_replaces_the_first_worker_takes_its_rank() -> None:
    ranks = ExpectedRanks()
    assert started(ranks, "w1", "w2", living={"w1": "a", "w2": "a"}) == [0, 1]
    assert started(ranks, "w3", living={"w2": "a", "w3": "a"}) == [0]
    assert started(ranks, "w4", living={"w2": "a", "w3": "a", "w4": "a"}) == [2]


def test_a_joiner_never_sees_rank_0() -> None:
    ranks = ExpectedRanks()
    started(ranks, "w1", "w2", living={"w1": "a", "w2": "a"})
    spec = GenerationSpec(generation=4, members=(Member(worker="w2", node="a"),))
    living = {"w2": "a", "w5": "b", "w6": "b"}
    assert started(ranks, "w5", "w6", living=living, spec=spec) == [2, 3]  # w2 was told 1
    alone = ExpectedRanks()
    joiner = alone.of("w5", {"w2": "a", "w5": "a"}, spec, 1)
    assert (joiner.rank, joiner.world_size, joiner.local_rank, joiner.local_world_size) == (1, 2, 1, 2)


def test_who_replaces_dead_member_is_told_the_coming_size() -> None:
    """A loader divides its batch by it: three where there are two gives other batches than the other worker's."""
    spec = GenerationSpec(generation=4, members=(Member(worker="w1", node="a"), Member(worker="w2", node="a")))
    place = ExpectedRanks().of("w3", {"w2": "a", "w3": "a"}, spec, 2)
    assert (place.rank, place.world_size) == (1, 2)
    nobody = ExpectedRanks().of("w3", {"w3": "a"}, spec, 1)
    assert nobody.rank == 1  # both members are dead, and yet it joins what they began


def test_worker_that_starts_over_keeps_what_it_was_told() -> None:
    ranks, living = ExpectedRanks(), {"w1": "a", "w2": "a"}
    assert started(ranks, "w1", "w2", "w1", living=living) == [0, 1, 0]


def test_a_member_knows_where_it_stands() -> None:
    spec = GenerationSpec(generation=1, members=tuple(Member(worker=f"w{i}", node="ab"[i // 2]) for i in range(4)))
    place = spec.place_of("w3")
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank) == (3, 4, 1, 2, 1)
