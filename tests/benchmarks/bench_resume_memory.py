"""Memory of a worker that continues from a checkpoint of all ranks: 25 M parameters, AdamW, 4 ranks, gloo.

Of a sharded model, which is built on the meta device, so that nothing else is held, and of optimizer state in tiles
(``strategy="zero1"``), whose model is whole on each rank. Bar: half of what it is when each worker reads the whole,
which is measured in other processes. The peak is that of the process's resident memory from reading the checkpoint
until the first step begins, without what it had before.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import common
from common import bar, finish, side_parser

WORLD = 4
SHARDED, TILES = "rows", "tiles"
MIB = 1 << 20


def main() -> None:
    """All ranks save once, and continue from that in new processes, in both ways; of either kind of state."""
    options = side_parser(__doc__ or "", sides=False).parse_args()
    from tests.loop.ranks import Ranks

    rows: list[dict[str, Any]] = []
    peaks: dict[tuple[str, str], float] = {}

    def run(function: Any, *arguments: Any) -> Any:
        ranks = Ranks()
        try:
            return ranks.run(function, *arguments, world=WORLD, timeout_s=600.0)
        finally:
            ranks.close()

    for kind in (SHARDED, TILES):
        folder = tempfile.mkdtemp(prefix="bench-resume-memory-")
        run(train_and_save, folder, kind)
        for turn in range(1 if options.quick else 3):
            for how in ("whole", kind):
                found = run(go_on, folder, kind, how)
                for rank, (peak_mib, seconds) in enumerate(found):
                    row = {"kind": kind, "how": how, "turn": turn, "rank": rank}
                    rows.append({**row, "peak [MiB]": peak_mib, "seconds": seconds})
                peaks[kind, how] = max(peaks.get((kind, how), 0.0), *(peak_mib for peak_mib, _ in found))
        shutil.rmtree(folder)
    bars = [
        bar(f"peak, {kind} / whole", value=peaks[kind, kind] / peaks[kind, "whole"], limit=0.5, at_least=False)
        for kind in (SHARDED, TILES)
    ]
    finish("memory of a worker that continues", rows=rows, bars=bars)


def _make(kind: str, device: str) -> tuple[Any, Any, Any]:
    """The model, the optimizer and the wrapper."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    if kind == TILES:
        model = common.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return model, optimizer, er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy="zero1")
    with torch.device(device):
        model = common.build_model()
    del model._buffers["steps"]  # it has no module that would fill it
    where = {"device": "cpu"} if device == "meta" else {}
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            er.fully_shard(layer, **where)
    er.fully_shard(model, **where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")


def train_and_save(folder: str, kind: str) -> None:
    """On one rank: some steps, and a part of a checkpoint."""
    import time

    import torch

    import elastic_ray as er
    from elastic_ray.checkpoints.run_directory import RunStorage
    from elastic_ray.loop.api import current_session
    from elastic_ray.run.registry import HookPoint
    from elastic_ray.worker.state_saver import StateSaver

    _, optimizer, wrapped = _make(kind, "cpu")
    session, storage = current_session(), RunStorage(folder)
    storage.create()
    saver = StateSaver(session, storage, lambda saved: 1e5, keep=2, interval_s=1e9, saving=session.registry.saving)
    session.registry.add_hook(HookPoint.BETWEEN_STEPS, saver.between_steps)
    for _ in er.remaining_epochs_until(1):
        for x, y in er.AdaptiveDataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH, drop_last=True):
            step = er.get_context().get_global_step()
            if step == 1 and session.rank == 0:
                saver.ask()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            while saver._busy() or saver._parts.makes_memory:
                time.sleep(0.01)
            if step == 12:
                break
    saver.close()


def go_on(folder: str, kind: str, how: str) -> tuple[float, float]:
    """On one rank: peak of the memory [MiB] of continuing, and times of reading and of entering the group [s]."""
    import gc
    import time

    import elastic_ray as er
    from elastic_ray.checkpoints.automatic import state_files
    from elastic_ray.checkpoints.run_directory import RunStorage
    from elastic_ray.checkpoints.sharded.reading import open_checkpoint
    from elastic_ray.loop.api import current_session
    from elastic_ray.state.unread import read_all

    made = _make(kind, "meta")
    session, storage = current_session(), RunStorage(folder)
    (state,) = state_files(storage)
    assert state.parts == WORLD
    gc.collect()
    before_mib = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    begin_s = time.perf_counter()
    trees = open_checkpoint(storage, state)
    session.states.resume(read_all(trees) if how == "whole" else trees, loaded=True)
    for _ in er.remaining_epochs_until(1):
        for _ in er.AdaptiveDataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH, drop_last=True):
            assert made  # the model lives
            return _resident("VmHWM") - before_mib, time.perf_counter() - begin_s
    raise AssertionError("no step began")


def _resident(name: str) -> float:
    """Of this process [MiB]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024 / MIB


if __name__ == "__main__":
    main()
