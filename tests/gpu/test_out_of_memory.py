"""Memory of a GPU that runs out: steps are drawn again in smaller parts, and training ends as with room enough.

python tests/gpu/test_out_of_memory.py            # all on one GPU, without pytest
torchrun --nproc-per-node 2 tests/gpu/test_out_of_memory.py     # two ranks, of which the second has little room
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyView, Request, SetBatch
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session

WIDTH, SAMPLES, BATCH = 512, 32768, 16384
ROOM_BYTES = 600 << 20
"""For weights (27 MB, and as much four times over) and some 100 KB a sample."""


@pytest.fixture
def little_room(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        pytest.skip("a CPU's memory is not bounded here; tests/loop/test_out_of_memory.py has an allocator that is")
    bound_room()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def bound_room() -> None:
    """Have the allocator refuse more than ``ROOM_BYTES``."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(ROOM_BYTES / torch.cuda.get_device_properties(0).total_memory)


class Doubling(Policy):
    """Sets twice the batch after every second step, until memory ends and beyond."""

    def after_step(self, view: PolicyView) -> Request | None:
        """As the class says."""
        return SetBatch(min(2 * view.batch_size, SAMPLES)) if view.step % 2 == 0 else None


def trained(
    kind: str = "plain", batch_size: int = BATCH, adapt: dict[str, Any] | None = None, epochs: int = 3
) -> dict[str, Any]:
    """What has come of a run; ``kind`` is plain, scaled, fused or sharded."""
    set_session(None)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 4096), nn.GELU(), nn.Linear(4096, 1024), nn.GELU(), nn.Linear(1024, 1)]
    model: Any = nn.Sequential(*layers).cuda()
    if kind == "sharded":
        er.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=kind == "fused")
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, enabled=kind == "scaled")
    wrapped = er.AdaptiveDataParallel(
        model,
        optimizer,
        grad_scaler=scaler if kind == "scaled" else None,
        scaling_rule="none",
        policy=Doubling() if adapt is not None else None,
    )
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=batch_size, seed=1)
    if adapt is not None:
        loader.autoscale_batch_size(**adapt)
    samples, last, since_s = 0, 0.0, time.perf_counter()
    for _ in er.remaining_epochs_until(epochs):
        sums = er.Accumulator()
        for batch, target in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=kind == "scaled"):
                loss = (wrapped(batch.cuda()) - target.cuda()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            sums["loss"] += float(loss) * len(batch)
            sums["count"] += len(batch)
        samples, last = samples + int(sums["count"]), sums["loss"] / sums["count"]
    took_s = time.perf_counter() - since_s
    wrapped.eval()
    with torch.no_grad():
        outputs = wrapped(x.cuda()).float()
    progress = current_session().progress
    return {
        "loss": last,
        "samples": samples,
        "steps": progress.steps,
        "bound": progress.memory_bound,
        "output": float(outputs.double().square().mean()),
        "seconds": took_s,
    }


def check(found: dict[str, Any], roomy: dict[str, Any], rough: float) -> None:
    """Memory has run out, and nothing else is other than with room enough."""
    assert found["bound"] is not None and found["bound"] < BATCH
    assert (found["samples"], found["steps"]) == (roomy["samples"], roomy["steps"])
    for each in ("loss", "output"):
        assert abs(found[each] - roomy[each]) < rough * abs(roomy[each]), (each, found, roomy)


KINDS = {"plain": 1e-4, "fused": 1e-4, "sharded": 1e-4, "scaled": 2e-2}


@pytest.mark.parametrize("kind", KINDS)
def test_little_room_gives_what_enough_gives(kind: str, little_room: None) -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)
    roomy = trained(kind)
    bound_room()
    check(trained(kind), roomy, KINDS[kind])


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_batch_that_doubles_until_memory_ends(accumulates: bool, little_room: None) -> None:
    found = trained(batch_size=512, adapt={"max_batch_size": SAMPLES, "gradient_accumulation": accumulates}, epochs=4)
    assert found["samples"] == 4 * SAMPLES and found["bound"] is not None


def main() -> None:
    """The same where pytest and its fixtures are not at hand; a line for each case."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for kind, rough in KINDS.items():
        if world > 1 and kind in ("sharded", "fused"):
            continue
        try:
            torch.cuda.set_per_process_memory_fraction(1.0)
            roomy = trained(kind)
            if world == 1 or rank == 1:
                bound_room()
            found = trained(kind)
            check(found, roomy, rough)
            text = (
                f"ok {found['steps']} steps, bound {found['bound']}, {found['seconds']:.2f} s; {roomy['seconds']:.2f}"
            )
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
        if rank == 0:
            print(kind, text, flush=True)
        if world > 1 and "ok" not in text:
            raise SystemExit(1)
    if world > 1:
        return
    bound_room()
    for accumulates in (True, False):
        adapt = {"max_batch_size": SAMPLES, "gradient_accumulation": accumulates}
        try:
            print("doubling", accumulates, trained(batch_size=512, adapt=adapt, epochs=4), flush=True)
        except Exception as error:
            print("doubling", accumulates, type(error).__name__, str(error)[:300], flush=True)


if __name__ == "__main__":
    main()
