"""Rounds of averaged models: speed where the network is slow, where one rank is slow, and where steps stall at random.

Four ranks on gloo; a step is a small net's and a sleep, so that the machine's cores decide nothing. Latency is a
sleep, too: an all-reduce takes 6 times 5 ms more, as its ring has 6 hops, and a question to a rank twice as long. Bars
of ``local_sgd`` and ``pair``, in rounds of 8 steps that give steps back: with 5 ms one way between ranks at most 1.1 x
the time without any communication; with one rank three times slower at least 0.8 of the sum of the ranks' speeds; with
a tenth of the steps five times longer at most 1.2 x the mean of the ranks' own times. Beside them all-reduce, and
``local_sgd`` with fixed shares.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import time
from typing import Any

from bench_sync import launch
from common import bar, finish, side_parser
from network import Loopback

RANKS, BATCH, STEPS, EPOCHS = 4, 8, 64, 3
STEP_S = 0.05
STRATEGIES = ("none", "all_reduce", "local_sgd, fixed shares", "local_sgd", "pair")
LATENCY_S = 0.005
FAR = "5 ms of latency"
SCENES = {FAR: (1.0, 0.0), "one rank 3 x slower": (3.0, 0.0), "a tenth stalls": (1.0, 0.1)}
STALL = 5.0


def main() -> None:
    """All ranks, and what rank 0 has measured."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--rank-of", nargs="*", help="of a process that this benchmark starts itself")
    parser.add_argument("--scene", choices=[*SCENES], help="this one alone")
    options = parser.parse_args()
    if options.rank_of is not None:
        _rank(options.rank_of)
        return
    found = {
        (scene, name): took
        for scene in ([options.scene] if options.scene else SCENES)
        for name, took in launch(Loopback(), RANKS, [scene], timeout_s=280, script=__file__).items()
    }
    ideal = {}
    for scene, (slow, stalls) in SCENES.items():
        speeds = [1.0 / (_factor(rank, slow) * (1.0 + stalls * (STALL - 1.0))) for rank in range(RANKS)]
        ideal[scene] = RANKS * STEPS * STEP_S / sum(speeds)
    ideal[FAR] = found.get((FAR, "none"), ideal[FAR])
    rows = [
        {"scene": scene, "strategy": name, "epoch [s]": took, "of the ideal time": took / ideal[scene]}
        for (scene, name), took in found.items()
    ]
    ratio = {(row["scene"], row["strategy"]): float(row["of the ideal time"]) for row in rows}
    claims: list[tuple[str, float | None, float, bool]] = []
    for name in ("local_sgd", "pair"):
        slow = ratio.get(("one rank 3 x slower", name))
        claims += [
            (f"{name}: time under 5 ms of latency / without communication", ratio.get((FAR, name)), 1.1, False),
            (f"{name}: speed with one slow rank / sum of speeds", None if slow is None else 1.0 / slow, 0.8, True),
            (
                f"{name}: time with random stalls / mean of the ranks' own",
                ratio.get(("a tenth stalls", name)),
                1.2,
                False,
            ),
        ]
    bars = [bar(claim, value=value, limit=limit, at_least=at_least) for claim, value, limit, at_least in claims]
    finish("rounds", rows=rows, bars=bars)


def _factor(rank: int, slow: float) -> float:
    return slow if rank == RANKS - 1 else 1.0


# -- one rank --------------------------------------------------------------------------------------------------------


def _rank(arguments: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    scene = " ".join(arguments)
    if scene == FAR:
        _move_apart()
    found = {name: _epoch_s(name, scene) for name in STRATEGIES if name != "none" or scene == FAR}
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps(found), flush=True)


class _Far:
    """A socket whose answers take a way there and back."""

    def __init__(self, near: socket.socket) -> None:
        self._near = near

    def recv(self, size: int) -> bytes:
        """As a socket's."""
        time.sleep(2 * LATENCY_S)  # the latency
        return self._near.recv(size)

    def recv_into(self, into: memoryview) -> int:
        """As a socket's."""
        time.sleep(2 * LATENCY_S)  # the latency
        return self._near.recv_into(into)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._near, name)


def _move_apart() -> None:
    """Have this rank's collectives and questions take as long as over a slow network."""
    from elastic_ray.communication import communicator

    connect = socket.create_connection
    setattr(socket, "create_connection", lambda *args, **kwargs: _Far(connect(*args, **kwargs)))  # noqa: B010
    comes_s: dict[int, float] = {}
    for group in (communicator.Communicator, communicator.GradientGroup):

        def far(self: Any, *args: Any, near: Any = group.all_reduce, **options: Any) -> Any:
            work = near(self, *args, **options)
            comes_s[id(work)] = time.monotonic() + 2 * (RANKS - 1) * LATENCY_S
            return work

        group.all_reduce = far
    ends = communicator.Communicator.waited_briefly

    def waited_briefly(self: Any, work: Any) -> bool:
        time.sleep(max(0.0, comes_s.pop(id(work), 0.0) - time.monotonic()))  # the latency
        return ends(self, work)

    communicator.Communicator.waited_briefly = waited_briefly


def _epoch_s(name: str, scene: str) -> float:
    """Time of an epoch [s]: the shortest one after the first, for others share the machine."""
    import torch

    import elastic_ray as er
    from elastic_ray.sync import LocalSGD, PairAveraging

    slow, stalls = SCENES[scene]
    rank = int(os.environ["RANK"])
    dice, step_s = random.Random(rank), STEP_S * _factor(rank, slow)
    model = torch.nn.Linear(16, 4)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.ones(RANKS * BATCH * STEPS, 16)

    def step(wrapped: Any, x: Any) -> None:
        optimizer.zero_grad()
        time.sleep(step_s * (STALL if dice.random() < stalls else 1.0))  # the scene's speed
        wrapped(x).square().mean().backward()
        optimizer.step()

    if name == "none":
        starts = [time.monotonic()]
        for _ in range(EPOCHS - 1):
            for x in torch.utils.data.DataLoader(data[: BATCH * STEPS], batch_size=BATCH):
                step(model, x)
            starts.append(time.monotonic())
        return min(end - start for start, end in itertools.pairwise(starts))
    strategy: Any = name
    if name == "pair":
        strategy = PairAveraging(period=8, give_back=True)
    elif name != "all_reduce":
        strategy = LocalSGD(period=8, give_back=name == "local_sgd")
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy, scaling_rule="none")
    loader = er.AdaptiveDataLoader(data, batch_size=RANKS * BATCH, seed=0)
    ends: list[float] = []
    for _ in er.remaining_epochs_until(EPOCHS):
        for x in loader:
            step(wrapped, x)
        ends.append(time.monotonic())
    return min(end - start for start, end in itertools.pairwise(ends))


if __name__ == "__main__":
    main()
