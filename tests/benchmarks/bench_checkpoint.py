"""What automatic checkpoints cost a job with 25 million parameters, against the same job without.

Bars: the pause at most 50 ms, and under 1 % of the time at the interval that the job would choose. One rank trains in
this process, with the saver that workers have; on two cores its thread competes with training as it would with another
rank. Checkpoints are forced every few seconds, in turns with stretches without, and their cost is spread over the
chosen interval.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from typing import Any

import pyarrow
import pyarrow.fs
from common import GLOBAL_BATCH, Rows, bar, build_model, finish, median, side_parser

from tests.hanging_storage import HangingHandler

EVERY_S = 6.0


def main() -> None:
    """SGD with momentum (200 MB of state) and Adam (300 MB); Adam also on storage that takes 50 ms a call, 100 MB/s."""
    options = side_parser(__doc__ or "", sides=False).parse_args()
    stretches = 2 if options.quick else 6
    rows = [measure(name, stretches) for name in ("SGD, momentum", "Adam")]
    rows.append(measure("Adam", stretches, bytes_per_s=100e6, call_s=0.05))
    bars = [
        bar(
            "longest pause [s], median of checkpoints",
            value=max(r["pause [s]"] for r in rows),
            limit=0.05,
            at_least=False,
        ),
        bar("part of the time", value=max(r["part of the time"] for r in rows), limit=0.01, at_least=False),
    ]
    finish("automatic checkpoints", rows=rows, bars=bars)


class SlowFiles(HangingHandler):
    """A directory of this machine as storage that takes its time.

    Args:
        root: the directory.
        bytes_per_s: what it takes [bytes/s].
        call_s: what each call takes besides [s].
    """

    def __init__(self, root: str, bytes_per_s: float, call_s: float) -> None:
        super().__init__(root, f"{root}/never hangs")
        self.bytes_per_s, self.call_s = bytes_per_s, call_s

    def _ask(self, *paths: str) -> Any:
        time.sleep(self.call_s)
        return super()._ask(*paths)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        """A stream that takes as long as the storage does."""
        stream = super().open_output_stream(path, metadata)
        return pyarrow.PythonFile(_SlowStream(stream, self.bytes_per_s), mode="w")


class _SlowStream:
    """Takes bytes no faster than a storage."""

    closed = False

    def __init__(self, stream: Any, bytes_per_s: float) -> None:
        self._stream, self._bytes_per_s = stream, bytes_per_s

    def write(self, data: Any) -> int:
        time.sleep(len(data) / self._bytes_per_s)
        self._stream.write(data)
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self.closed = True
        self._stream.close()


def measure(optimizer_name: str, stretches: int, *, bytes_per_s: float = 0.0, call_s: float = 0.0) -> dict[str, Any]:
    """Train, in turns with checkpoints and without; on slow storage where ``bytes_per_s`` says how slow."""
    import torch

    import elastic_ray as er
    from elastic_ray.checkpoints.interval import PRIOR_MEAN_TIME_S, checkpoint_interval_s
    from elastic_ray.checkpoints.run_directory import RunStorage
    from elastic_ray.loop.api import current_session
    from elastic_ray.run.current import set_session
    from elastic_ray.run.registry import HookPoint
    from elastic_ray.worker.messages import StateSaved
    from elastic_ray.worker.state_saver import StateSaver

    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="bench-checkpoint-")
    slow = pyarrow.fs.PyFileSystem(SlowFiles(folder, bytes_per_s, call_s)) if bytes_per_s else None
    storage = RunStorage("run" if slow else folder, slow)
    storage.create()
    set_session(None)
    model = build_model()
    parameters = model.parameters()
    optimizer: Any = (
        torch.optim.Adam(parameters, lr=1e-4)
        if optimizer_name == "Adam"
        else torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    )
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(Rows(), batch_size=GLOBAL_BATCH)
    saved: list[StateSaved] = []

    def told(message: StateSaved) -> float:
        saved.append(message)
        return PRIOR_MEAN_TIME_S

    saver: StateSaver | None = None
    steps: dict[bool, list[float]] = {False: [], True: []}  # time per step of whole stretches, without and with
    begin, count, done, saving = time.monotonic(), 0, 0, False
    current_session().registry.add_hook(
        HookPoint.BETWEEN_STEPS, lambda: saver.between_steps() if saving and saver is not None else None
    )
    for _ in er.remaining_epochs_until(1):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            count += 1
            now = time.monotonic()
            if now - begin < 2 * EVERY_S:
                continue
            if done:  # the first stretch warms up
                steps[saving].append((now - begin) / count)
            done += 1
            saving = not saving
            if saving and saver is None:
                saver = StateSaver(current_session(), storage, told, keep=2, interval_s=EVERY_S)
            begin, count = time.monotonic(), 0
            if done > 2 * stretches:
                break
    assert saver is not None
    saver.close()
    set_session(None)
    shutil.rmtree(folder)
    without, with_them = statistics.median(steps[False]), statistics.median(steps[True])
    per_checkpoint_s = (with_them / without - 1.0) * EVERY_S
    cost_s = statistics.median(s.cost_s for s in saved)
    interval_s = checkpoint_interval_s(cost_s, PRIOR_MEAN_TIME_S)
    return {
        "optimizer": optimizer_name,
        "storage": f"{bytes_per_s / 1e6:g} MB/s" if bytes_per_s else "local",
        "state [MB]": saved[-1].state.size / 1e6,
        "checkpoints": len(saved),
        "pause [s]": median(s.pause_s for s in saved),
        "worst pause [s]": max(s.pause_s for s in saved),
        "write [s]": median(s.write_s for s in saved),
        "its CPU + pause [s]": cost_s,
        "step without [s]": without,
        "step with, every 6 s [s]": with_them,
        "cost of one [s]": per_checkpoint_s,
        "interval chosen [s]": interval_s,
        "part of the time": max(per_checkpoint_s, cost_s) / interval_s,
    }


if __name__ == "__main__":
    main()
