"""Automatic checkpoints that all ranks write against those that rank 0 writes: 25 M parameters, AdamW, 4 ranks, gloo.

Bars: neither the pause nor what a checkpoint takes from the training more than with replicated state. Both strategies
take turns in the same processes. In its turn each saves once to have memory for its copies, as a job has from its first
checkpoint on, makes some steps without, and saves again, which counts. The pause is what the slowest rank spends
between two steps on agreeing, which rides on the steps' own sums, and on its copy. The cost is the pause and the
processor's time of writing, of the rank that has most of it. Besides there is what rank 0's steps with a checkpoint
take longer than as many without: it waits for other ranks' copies in them, and all compete with what is written.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from typing import Any

import common
from common import bar, finish, side_parser

WORLD = 4
_WARM, _WITHOUT, _WITH = 8, 8, 14
_BLOCK = _WARM + _WITHOUT + _WITH
STRATEGIES = ("all_reduce", "zero1")


def main() -> None:
    """One run of all ranks."""
    options = side_parser(__doc__ or "", sides=False).parse_args()
    from tests.loop.ranks import Ranks

    ranks = Ranks()
    folder = tempfile.mkdtemp(prefix="bench-sharded-checkpoint-")
    found = ranks.run(train_and_save, folder, 2 if options.quick else 6, world=WORLD, timeout_s=1800.0)
    ranks.close()
    shutil.rmtree(folder)
    rows = [row for strategy in STRATEGIES for row in _rows(strategy, [each[strategy] for each in found])]
    values = {(row["what"], row["strategy"]): row["value"] for row in rows}
    bars = [
        bar(
            f"{what}, all ranks / rank 0",
            value=values[what, "zero1"] / values[what, "all_reduce"],
            limit=1.0,
            at_least=False,
        )
        for what in ("pause [s]", "its CPU + pause [s]")
    ]
    finish("sharded checkpoints", rows=rows, bars=bars)


def train_and_save(folder: str, turns: int) -> dict[str, dict[str, list[float]]]:
    """On one rank: pauses, processor times of writing, sizes, and times of steps without and with, by strategy."""
    import torch

    import elastic_ray as er
    from elastic_ray.checkpoints.run_directory import RunStorage
    from elastic_ray.loop.api import current_session
    from elastic_ray.run.registry import HookPoint
    from elastic_ray.worker.state_saver import StateSaver

    torch.set_num_threads(1)
    model = common.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parallel = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=STRATEGIES[0])
    loader = er.AdaptiveDataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH, drop_last=True)
    session, storage = current_session(), RunStorage(folder)
    storage.create()
    found: dict[str, dict[str, list[float]]] = {
        each: {name: [] for name in ("agreeing", "copying", "cpu", "without", "with", "write", "longer")}
        for each in STRATEGIES
    }
    saver = StateSaver(session, storage, lambda saved: 1e5, keep=2, interval_s=1e9, saving=session.registry.saving)
    written: list[tuple[float, float]] = []
    begin = saver._write

    def timed(write: Any, pause_s: float, go_on: Any) -> None:
        cpu_s, begin_s = time.thread_time(), time.perf_counter()
        begin(write, pause_s, go_on)
        written.append((time.thread_time() - cpu_s, time.perf_counter() - begin_s))

    saver._write = timed
    spent = {"agreeing": 0.0, "copying": 0.0}

    def agreeing(agree: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin_s = time.perf_counter()
            agreed = agree(*arguments, **options)
            spent["agreeing"] += time.perf_counter() - begin_s
            return agreed

        return timed

    def copy_timed() -> None:
        begin_s = time.perf_counter()
        saver.between_steps()
        spent["copying"] += time.perf_counter() - begin_s

    for name in ("_saved_by_step", "_make_equal"):
        setattr(session._changes, name, agreeing(getattr(session._changes, name)))
    session.registry.add_hook(HookPoint.BETWEEN_STEPS, copy_timed)
    step, before = 0, time.perf_counter()
    for _ in er.remaining_epochs_until(1):
        for x, y in loader:
            now = time.perf_counter()
            strategy, place = STRATEGIES[step // _BLOCK % 2], step % _BLOCK
            times = found[STRATEGIES[(step - 1) // _BLOCK % 2]]
            if step and (step - 1) % _BLOCK >= _WARM:
                times["without" if (step - 1) % _BLOCK < _WARM + _WITHOUT else "with"].append(now - before)
            if step and place == 0:
                _close_block(times, spent, written, saver)
            before = time.perf_counter()
            if step == 2 * turns * _BLOCK:
                break
            if place == 0:
                parallel.set_strategy(strategy)
            if place == _WARM:
                _await_written(saver)
                written.clear()
                spent.update(agreeing=0.0, copying=0.0)
            if place in (1, _WARM + _WITHOUT) and session.rank == 0:
                saver.ask()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            step += 1
    saver.close()
    return found


def _close_block(
    times: dict[str, list[float]], spent: dict[str, float], written: list[tuple[float, float]], saver: Any
) -> None:
    """Account for what one strategy has done in its turn; a checkpoint that is not written by then is waited for."""
    _await_written(saver)
    for name in spent:
        times[name].append(spent[name])
        spent[name] = 0.0
    without = statistics.median(times["without"][-_WITHOUT:])
    times["longer"].append(sum(times["with"][-_WITH:]) - _WITH * without)
    times["cpu"].append(sum(cpu_s for cpu_s, _ in written))
    times["write"].append(sum(write_s for _, write_s in written))
    written.clear()


def _await_written(saver: Any) -> None:
    while saver._busy():
        time.sleep(0.01)


def _rows(strategy: str, ranks: list[dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Of one strategy, from all ranks; its first turn imports, and does not count."""

    def by_turn(name: str, of: Any = max) -> list[float]:
        return [of(each) for each in zip(*(each[name] for each in ranks), strict=True)][1:]

    pauses = [
        max(agreeing + copying for agreeing, copying in turn)
        for turn in zip(*(zip(each["agreeing"], each["copying"], strict=True) for each in ranks), strict=True)
    ][1:]
    cpu = by_turn("cpu")
    told = {
        "pause [s]": statistics.median(pauses),
        "agreeing, at most [s]": statistics.median(by_turn("agreeing")),
        "its steps, longer by [s]": statistics.median(ranks[0]["longer"][1:]),
        "its CPU + pause [s]": statistics.median([one + other for one, other in zip(pauses, cpu, strict=True)]),
        "CPU of all ranks [s]": statistics.median(by_turn("cpu", sum)),
        "writing [s]": statistics.median(by_turn("write")),
        "step without [s]": max(statistics.median(each["without"]) for each in ranks),
        "step with [s]": max(statistics.median(each["with"]) for each in ranks),
        "checkpoints": float(len(pauses)),
    }
    return [{"what": what, "strategy": strategy, "value": value} for what, value in told.items()]


if __name__ == "__main__":
    main()
