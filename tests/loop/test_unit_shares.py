"""A slow unit gets fewer samples; those of its workers that read the same samples continue to do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.communication.unit_group import UnitGroup
from elastic_ray.loop.api import current_session
from elastic_ray.stragglers.detection import StragglerConfig
from elastic_ray.unit import Unit
from tests.loop.unit_threads import added_in, run_units

SAMPLES, BATCH, EPOCHS = 96, 24, 16
SHARED = StragglerConfig(response="share")


def train(unit: UnitGroup, slow: set[tuple[int, int]], **limits: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Samples of each step, and the trained weight, where the time goes by samples, and thrice as fast on the slow."""
    session, now_s = current_session(), 0.0
    me = int(session.worker[1:]) - 1
    session.run.meter._clock = lambda: now_s
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(model.weight)
    if unit.place.shards > 1:  # as fully_shard does
        model.weight.register_hook(lambda grad: added_in(unit, grad) / unit.place.shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    rows = torch.arange(SAMPLES, dtype=torch.float64)[:, None] / SAMPLES
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(rows), batch_size=BATCH)
    if limits:
        loader.autoscale_batch_size(BATCH, **limits)
    steps = []
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in loader:
            steps.append((x[:, 0] * SAMPLES).round().int().tolist())
            now_s += len(x) * (0.3 if (me, unit.place.position) in slow else 0.1)
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    return steps, model.weight.detach()


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("unit", [2, Unit(shard=2)])
@pytest.mark.parametrize("slow", [(1, 0), (1, 1)])
def test_slow_unit_gets_smaller_share(unit: Any, slow: tuple[int, int], tmp_path: Path) -> None:
    """Whichever of its workers is the slow one; the gradients stay those of the whole batch."""
    found = run_units(lambda group: train(group, {slow}), tmp_path, unit=unit, stragglers=SHARED)
    even = run_units(lambda group: train(group, set()), tmp_path / "even", unit=unit, stragglers=SHARED)
    parts = [[worker[0][-1] for worker in row] for row in found]
    assert [[worker[0] for worker in row] for row in even] != [[worker[0] for worker in row] for row in found]
    if unit == 2:
        assert [row[0] == row[1] for row in parts] == [True, True]
        sizes = [len(row[0]) for row in parts]
    else:
        assert [len(row[0]) - len(row[1]) for row in parts] == [0, 0]
        assert not any(set(row[0]) & set(row[1]) for row in parts)
        sizes = [len(row[0]) + len(row[1]) for row in parts]
    assert sum(sizes) == BATCH and sizes[1] <= 8 < 16 <= sizes[0]
    for step in range(len(found[0][0][0])):
        used = {i for row in found for worker in row for i in worker[0][step]}
        assert used == {i for row in even for worker in row for i in worker[0][step]} and len(used) == BATCH
    for (_, weight), (_, wanted) in zip(
        [w for row in found for w in row], [w for row in even for w in row], strict=True
    ):
        torch.testing.assert_close(weight, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("unit", "wanted"), [(2, [15, 9]), (Unit(shard=2), [14, 10])])
def test_shares_keep_within_bounds_of_a_unit(unit: Any, wanted: list[int], tmp_path: Path) -> None:
    bounds = {"local_bsz_bounds": (9, None)}
    found = run_units(lambda group: train(group, {(1, 0)}, **bounds), tmp_path, unit=unit, stragglers=SHARED)
    of_step = [sum(len(worker[0][-1]) for worker in row) // (2 if unit == 2 else 1) for row in found]
    assert of_step == wanted
