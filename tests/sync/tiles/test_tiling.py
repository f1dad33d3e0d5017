"""Tiles cover all parameters, are about equally large, and few of them move; what is planned for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from elastic_ray.communication.communicator import Communicator
from elastic_ray.sync import AllReduce, Strategy, StrategyError, ZeRO1
from elastic_ray.sync.builders import PartitionedPS, UnevenPartitionedPS
from elastic_ray.sync.optimizer_tiles.moves import carry_out
from elastic_ray.sync.optimizer_tiles.tiling import Tiling, cut
from elastic_ray.sync.plan import ModelProfile, OptimizerInfo, ParamInfo, Topology, lower
from elastic_ray.sync.sharded.placement import Move, hand_over, lost, moves, place
from elastic_ray.sync.spec import Owner, Rule
from tests.membership.groups import on_ranks

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=12)


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    return ModelProfile(
        params=tuple(
            ParamInfo(
                names=(f"p{number}",),
                shape=shape,
                dtype=draw(st.sampled_from(["float32", "bfloat16"])),
                divisible=draw(st.booleans()),
            )
            for number, shape in enumerate(draw(shapes))
        ),
        optimizer=OptimizerInfo(elementwise=draw(st.booleans())),
    )


def tiles_of(profile: ModelProfile, how: str = "equal") -> Tiling:
    return cut(profile, range(len(profile.params)), Owner(unit="tile", cut=how))


@given(profiles(), st.sampled_from(["equal", "divisor", "uneven"]))
@settings(max_examples=60)
def test_tiles_cover_every_element_once(profile: ModelProfile, how: str) -> None:
    tiling = tiles_of(profile, how)
    assert tiling == tiles_of(profile, how) == Tiling.from_json(tiling.to_json())
    by_name = {param.name: param for param in profile.params}
    covered: dict[str, list[int]] = {param.name: [0] * param.numel for param in profile.params}
    for tile in tiling.tiles:
        assert len({by_name[span.name].dtype for span in tile}) == 1
        for span in tile:
            param = by_name[span.name]
            assert span.whole == (span.length == param.numel)
            assert span.whole or (param.divisible and profile.optimizer.elementwise)
            for element in range(span.start, span.start + span.length):
                covered[span.name][element] += 1
    assert all(count == 1 for counts in covered.values() for count in counts)


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=20))
def test_tiles_of_all_tensors_together_are_equally_large(sizes: list[int]) -> None:
    profile = ModelProfile(params=tuple(ParamInfo(names=(f"p{n}",), shape=(size,)) for n, size in enumerate(sizes)))
    tiling = tiles_of(profile)
    elements = [tiling.elements(tile) for tile in range(len(tiling))]
    assert max(elements) <= sum(sizes) / len(tiling) + 64
    # Kernels treat the last elements of a tensor in another way: cuts are where those of a whole tensor would be.
    assert all(span.start % 64 == 0 for tile in tiling.tiles for span in tile)


@pytest.mark.parametrize(
    ("how", "rows", "parts"),
    [
        ("divisor", 12, 2),
        ("divisor", 15, 3),
        ("divisor", 7, 7),
        ("divisor", 1, 1),
        ("divisor", 101, 64),
        ("uneven", 12, 5),
        ("uneven", 7, 2),
        ("uneven", 2, 2),
        ("uneven", 1, 1),
    ],
)
def test_partitioned_tensors_have_as_many_parts_as_autodist_counts(how: str, rows: int, parts: int) -> None:
    profile = ModelProfile(params=(ParamInfo(names=("p",), shape=(rows, 3)),))
    spans = [span for tile in tiles_of(profile, how).tiles for span in tile]
    assert len(spans) == parts and all(span.start % 3 == 0 for span in spans)
    sizes = {span.length for span in spans}
    assert len(sizes) == 1 or how == "uneven" or parts == 64


def most_that_stay(held: list[set[int]], own: list[set[int]], copies: int) -> int:
    """Copies that stay where they are in the best plan with so many tiles on each rank, by linear programming."""
    tiles, world = len(set().union(*held)), len(held)
    stays = np.array([[tile in each for each in held] for tile in range(tiles)], dtype=float)
    of_tile, of_rank = np.kron(np.eye(tiles), np.ones(world)), np.kron(np.ones(tiles), np.eye(world))
    counts = [copies] * tiles + [len(each) for each in own]
    best = linprog(-stays.ravel(), A_eq=np.vstack([of_tile, of_rank]), b_eq=counts, bounds=(0, 1), method="highs")
    return round(-best.fun)


@given(st.integers(1, 64), st.integers(1, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_through_a_run_tiles_keep_owners_and_few_move(tiles: int, copies: int, data: st.DataObject) -> None:
    """Workers join, leave after a hand-over, and are killed one at a time."""
    nodes = data.draw(st.sampled_from([["a", "a"], ["a", "b"]]))
    held: list[set[int]] = [set(range(tiles))] * 2
    for _ in range(data.draw(st.integers(1, 5))):
        owners = place(tiles, held, nodes, copies)
        sent = moves(held, owners)
        world = len(nodes)
        own = [{tile for tile, mine in enumerate(owners) if rank in mine} for rank in range(world)]
        assert all(len(set(mine)) == min(copies, world) for mine in owners)
        assert max(map(len, own)) - min(map(len, own)) <= 1
        if len(set(nodes)) == 1:  # few move that could stay; most often none
            assert len(sent) <= tiles * min(copies, world) - most_that_stay(held, own, min(copies, world)) + 3 * world
        if copies == 2 and 2 * max(nodes.count("a"), nodes.count("b")) <= world:
            assert all(len({nodes[rank] for rank in mine}) == 2 for mine in owners)
        kind = data.draw(st.sampled_from(["join", "leave", "kill"]))
        if kind == "join" or world < 2:
            count = data.draw(st.integers(1, 3))
            nodes, held = (
                nodes + data.draw(st.lists(st.sampled_from(nodes), min_size=count, max_size=count)),
                [
                    *own,
                    *(set() for _ in range(count)),
                ],
            )
            continue
        goes = data.draw(st.integers(0, world - 1))
        if kind == "leave":
            for move in hand_over(owners, [rank != goes for rank in range(world)]):
                own[move.destination].add(move.tile)
        held, nodes = own[:goes] + own[goes + 1 :], nodes[:goes] + nodes[goes + 1 :]
        if kind == "kill" and copies == 1:
            return
        assert not lost(tiles, held)


PROFILE = ModelProfile(
    params=tuple(ParamInfo(names=(f"layer.{n}.{kind}",), shape=(40, 40)) for n in range(4) for kind in "ab")
)


def planned(strategy: Strategy, world: int) -> tuple[object, ...]:
    plan = lower(strategy, PROFILE, Topology(nodes=("n",) * world))
    return plan.buckets, plan.tiles is not None and plan.tiles.divided


@pytest.mark.parametrize("builder", [ZeRO1(), PartitionedPS(), UnevenPartitionedPS(), ZeRO1(copies=3)])
def test_gradients_are_reduced_as_without_tiles(builder: ZeRO1) -> None:
    strategy = builder.build(PROFILE, Topology())
    plain = AllReduce().build(PROFILE, Topology())
    for world in range(1, 6):
        buckets, divided = planned(strategy, world)
        assert buckets == planned(plain, world)[0] and divided == (world > builder.copies)
    assert strategy.exact and "on " + str(builder.copies) in strategy.invariant
    assert Strategy.from_json(strategy.to_json()) == strategy


def test_one_model_has_one_way_of_tiles() -> None:
    rules = (Rule(pattern="*.a", sync=Owner(unit="tile", copies=1)),)
    with pytest.raises(StrategyError, match="the same cut, but got copies=1, cut='equal' and"):
        lower(Strategy(rules=rules, default=Owner(unit="tile")), PROFILE, Topology())
    plan = lower(Strategy(rules=rules), PROFILE, Topology(nodes=("n",) * 3))
    assert plan.tiles is not None and plan.tiles.params == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"copies": 0}, "copies must be a whole number, 1 or more"),
        ({"copies": 9}, "copies must be a whole number, 8 or less"),
        ({"cut": "rows"}, "cut must be one of equal, divisor, uneven"),
        ({"unit": "row"}, "unit must be one of tensor, tile"),
        ({"gradients": "half"}, "gradients must be one of full"),
        ({"placement": "first"}, "placement must be 'balanced' for tiles"),
    ],
)
def test_owners_that_cannot_be_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        Owner(**{"unit": "tile", **options})


@pytest.mark.parametrize(("elements", "tiles"), [(64, 1), (100, 1), (127, 1), (128, 2), (256, 4)])
def test_tiles_have_64_elements_and_know_their_parameters(elements: int, tiles: int) -> None:
    profile = ModelProfile(params=(ParamInfo(names=("p",), shape=(elements,)),))
    tiling = tiles_of(profile)
    assert len(tiling) == tiles and tiling.names == {"p"}


@pytest.mark.parametrize("world", [2, 3])
def test_every_tile_on_its_way_reaches_its_owner(world: int) -> None:
    """Each rank holds a tile of its own, and one that only rank 0 has goes to all."""
    held = [{rank, 9} if rank == 0 else {rank} for rank in range(world)]
    to_come = [Move(tile, tile, rank) for tile in range(world) for rank in range(world) if rank != tile]
    to_come += [Move(9, 0, rank) for rank in range(1, world)]

    def work(communicator: Communicator) -> dict[int, float]:
        def give(tile: int) -> list[Any]:
            assert tile in held[communicator.rank]
            return [{"exp_avg": torch.full((3,), float(tile))}]

        return {tile: states[0]["exp_avg"][2].item() for tile, states in carry_out(communicator, to_come, give)}

    for rank, found in enumerate(on_ranks(world, work)):
        assert found == {tile: float(tile) for tile in (*range(world), 9) if tile not in held[rank]}
