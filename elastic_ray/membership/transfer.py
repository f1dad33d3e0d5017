"""Schedule of the state transfer between ranks, in few rounds (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ray.membership.messages import StateVersion


def transfer_rounds(progress: Sequence[StateVersion]) -> list[list[tuple[int, int]]]:
    """Rounds of ``(source rank, destination rank)`` after which every rank holds the furthest state.

    The ranks with the furthest progress hold state; all others need it. In each round every holder sends to one
    that needs, so that with h holders n needers are served in ceil(log2((n + h) / h)) rounds. Survivors of a torn
    step that lag behind are needers like newcomers. Holders that are still leaving a loader pass which others have
    left already do not send: a newcomer would stay behind in it for good. When no rank holds a trained state (the
    first generation, or a restart from a checkpoint), rank 0 is the source.

    Args:
        progress: progress of each rank, in rank order; not empty.
    """
    if not progress:
        raise ValueError("progress must hold at least one rank, but got none")
    furthest = max(p.order() for p in progress)
    holders = [rank for rank, p in enumerate(progress) if p.order() == furthest] if furthest[0] else [0]
    needers = [rank for rank in range(len(progress)) if rank not in set(holders)]
    passes = max(progress[rank].passes for rank in holders)
    holders = [rank for rank in holders if progress[rank].passes == passes]
    rounds: list[list[tuple[int, int]]] = []
    while needers:
        served = list(zip(holders, needers, strict=False))
        rounds.append(served)
        holders = holders + [destination for _, destination in served]
        needers = needers[len(served) :]
    return rounds
