"""All-reduces with a selectable topology that defines the rounds of transfers between ranks (torch).

In KungFu (OSDI 2020), the topology of an all-reduce is a parameter that adaptation policies can change. Here, a
topology is a schedule of rounds, the same on all ranks. On CPUs, a round consists of sends and receives between the
ranks that exchange data. On GPUs, it is one ``all_to_all``, which NCCL orders with its other collectives. Each sum is
computed by one rank and then copied, or by two ranks from the same two parts, so all ranks get bit-identical results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.sync.operations.bucket_operation import BucketOperation
from elastic_ray.sync.operations.buckets import Bucket

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup


Span = tuple[int, int]
"""Part of a vector: its first element, and the one after its last."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Transfers in an all-reduce that happen at the same time.

    Attributes:
        transfers: Part of the vector to send, keyed by (source rank, destination rank).
        adds: Whether the destination adds received parts to its own part (in source order) instead of replacing it.
    """

    transfers: Mapping[tuple[int, int], Span]
    adds: bool


def cut(span: Span, parts: int) -> list[Span]:
    """Divide a span into ``parts`` consecutive spans with lengths that differ by at most one element."""
    begin, end = span
    edges = [begin + (end - begin) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def ring(nodes: Sequence[int], size: int) -> list[Round]:
    """Return the 2 (W - 1) rounds of a ring of W ranks, with each rank sending only to the next one.

    A ring sends the fewest bytes per link. ``nodes[r]`` is rank r's node; ranks on the same node are neighbours.
    ``size`` is the number of elements. Source: Patarasuk and Yuan, J. of Parallel and Distributed Computing 69(2),
    2009.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    world, pieces = len(order), cut((0, size), len(order))
    rounds = []
    for adds, first in ((True, 0), (False, 1)):
        for number in range(world - 1):
            moved = {(order[i], order[(i + 1) % world]): pieces[(i + first - number) % world] for i in range(world)}
            rounds.append(Round(transfers=moved, adds=adds))
    return rounds


def tree(nodes: Sequence[int], size: int) -> list[Round]:
    """Return the 2 ceil(log2 W) rounds of a binomial tree of W ranks, suited to small buckets; see :func:`ring`.

    Sums travel up to the root, and the result travels back down. Ranks on the same node exchange data first.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    up, stride = [], 1
    while stride < len(order):
        up.append([(order[i + stride], order[i]) for i in range(0, len(order) - stride, 2 * stride)])
        stride *= 2
    down = [[(parent, child) for child, parent in level] for level in reversed(up)]
    return [
        Round(transfers=dict.fromkeys(pairs, (0, size)), adds=adds)
        for adds, levels in ((True, up), (False, down))
        for pairs in levels
    ]


def star(nodes: Sequence[int], size: int) -> list[Round]:
    """Return the two rounds of a star: W - 1 ranks send to rank 0, which returns the sum; see :func:`ring`."""
    others = range(1, len(nodes))
    return [
        Round(transfers={(rank, 0): (0, size) for rank in others}, adds=True),
        Round(transfers={(0, rank): (0, size) for rank in others}, adds=False),
    ]


def two_level(nodes: Sequence[int], size: int) -> list[Round]:
    """Return rounds that sum within nodes, then between nodes, and copy the result within nodes; see :func:`ring`.

    Each node sends the bucket only once. The number of slices is the number of ranks on the smallest node. On each
    node, one rank is responsible for each slice. This rank sums the slice within the node, then with its counterparts
    on other nodes, and sends it to all ranks on its node. Two counterparts exchange their slices, and both add them.
    More than two reduce-scatter the slice and gather the results, which takes two rounds.
    """
    members = [[rank for rank, node in enumerate(nodes) if node == each] for each in sorted(set(nodes))]
    slices = cut((0, size), min(map(len, members)))
    inside = {
        (rank, carrier): span
        for ranks in members
        for carrier, span in zip(ranks, slices, strict=False)
        for rank in ranks
        if rank != carrier
    }
    two = len(members) == 2
    between = {
        (source[at], destination[at]): part
        for at, span in enumerate(slices)
        for destination, part in zip(members, [span, span] if two else cut(span, len(members)), strict=True)
        for source in members
        if source is not destination
    }
    rounds = (Round(transfers=inside, adds=True), Round(transfers=between, adds=True))
    backwards = [
        Round(transfers={(to, by): span for (by, to), span in each.transfers.items()}, adds=False)
        for each in (rounds[:1] if two else reversed(rounds))
    ]
    return [each for each in (*rounds, *backwards) if each.transfers]


SCHEDULES: Mapping[str, Callable[[Sequence[int], int], list[Round]]] = MappingProxyType(
    {"two_level": two_level, "ring": ring, "tree": tree, "star": star}
)
"""By name: from the node of each rank, as numbers, and the elements of a bucket to the rounds of its sum."""


class RoutedReduceOperation(BucketOperation):
    """Sum of a flat bucket and its tail, following a schedule of rounds; a stateless ``BucketOperation``.

    On CPUs, ranks send only to ranks that receive data, and one thread per bucket runs the rounds. On GPUs, each round
    is one ``all_to_all``.

    Args:
        topology: Name of a topology in :data:`SCHEDULES`.
    """

    def __init__(self, topology: str, nodes: Sequence[int]) -> None:
        self._schedule, self._nodes = SCHEDULES[topology], tuple(nodes)
        self._rounds: list[Round] = []
        self._size = -1
        self._coming: list[tuple[Span, torch.Tensor]] = []

    def launch(self, bucket: Bucket, group: GradientGroup) -> Sequence[Any]:
        """Start the first round."""
        flat = bucket.flat
        if self._size != flat.numel():
            self._size = flat.numel()
            self._rounds = self._schedule(self._nodes, self._size)
        if flat.is_cuda:
            return self._start(0, bucket, group)
        sent = sum(
            end - begin
            for each in self._rounds
            for (source, _), (begin, end) in each.transfers.items()
            if source == group.rank
        )
        transfer = functools.partial(exchange, self._rounds, flat, group.rank)
        return (group.in_background(transfer, len(self._rounds), sent * flat.itemsize),)

    def next_round(self, bucket: Bucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        """Add or copy the parts received in the last round and start the next round."""
        if not bucket.flat.is_cuda:
            return ()
        for (begin, end), part in self._coming:
            mine = bucket.flat[begin:end]
            mine.add_(part) if self._rounds[finished - 1].adds else mine.copy_(part)
        self._coming = []
        return self._start(finished, bucket, group) if finished < len(self._rounds) else ()

    def _start(self, number: int, bucket: Bucket, group: GradientGroup) -> Sequence[Any]:
        """Start a round and return its only work object."""
        flat, moved = bucket.flat, self._rounds[number].transfers
        out = [moved.get((group.rank, peer), (0, 0)) for peer in range(group.world_size)]
        into = [moved.get((peer, group.rank), (0, 0)) for peer in range(group.world_size)]
        sizes = [end - begin for begin, end in into]
        received = flat.new_empty(sum(sizes))
        pieces = torch.split(received, sizes)
        self._coming = [(span, piece) for span, piece in zip(into, pieces, strict=True) if piece.numel()]
        sent = [flat[begin:end] for begin, end in out if end > begin]
        given = sent[0] if len(sent) == 1 else torch.cat([flat[:0], *sent])
        return (group.all_to_all(received, given, sizes, [end - begin for begin, end in out]),)

    def void(self) -> None:
        """Drop buffers that an abandoned collective may still be writing to; the operation has no other state."""
        self._coming = []


def exchange(rounds: Sequence[Round], flat: torch.Tensor, rank: int, group: Any, tag: int) -> None:
    """Run all of a rank's rounds, using the sends and receives of torch's process group ``group``.

    All receives start at once, so that no sender waits for its receiver to be ready. Copied parts are received in
    place: their sum includes the values there, which have therefore been sent.

    Args:
        tag: First of this exchange's tags; each round uses one tag.

    Raises RuntimeError if a peer is gone, or the group's timeout has passed.
    """
    timeout = group.options._timeout  # without it gloo's sends and receives keep the one that the group was formed with
    coming: list[list[tuple[torch.Tensor, torch.Tensor, Any]]] = []
    for number, each in enumerate(rounds):
        parts = []
        for (source, destination), (begin, end) in sorted(each.transfers.items()):
            if destination == rank and begin < end:
                mine = flat[begin:end]
                part = torch.empty_like(mine) if each.adds else mine
                parts.append((mine, part, group.recv([part], source, tag + number)))
        coming.append(parts)
    for number, (each, parts) in enumerate(zip(rounds, coming, strict=True)):
        going = [
            group.send([flat[begin:end]], destination, tag + number)
            for (source, destination), (begin, end) in each.transfers.items()
            if source == rank and begin < end
        ]
        for work in going:
            work.wait(timeout)  # two ranks may add what they exchange
        for mine, part, work in parts:
            work.wait(timeout)
            if part is not mine:
                mine.add_(part)
