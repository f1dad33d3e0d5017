"""Norms of a sharded model's gradients and updates are those of the same model in plain torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring.gradient_measures import GradientNorms
from elastic_ray.monitoring.monitor import Monitor
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.sharded_parameters.sharded import Net, data, sharded_net

MAKERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-2),
}
STEPS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """How it is trained."""

    optimizer: str = "adamw"
    micro: int | None = None
    losses: int = 1
    clip: bool = False
    frozen: bool = False
    every: int = 1
    shard_size: int | None = None


Seen = dict[int, GradientNorms | None]


class Loop:
    """One worker's: what is known after each step, and what plain torch finds in a model that is not sharded."""

    def __init__(self, case: Case, *, sharded: bool) -> None:
        self.case = case
        self.model = sharded_net(shard_size=case.shard_size) if sharded else Net()
        blocks = list(self.model.blocks.parameters())
        rest = [p for name, p in self.model.named_parameters() if "blocks" not in name]
        self.groups = [blocks, rest[:2], rest[2:]]
        self.freeze(0)
        optimizer = MAKERS[case.optimizer]([{"params": each} for each in self.groups])
        monitor = Monitor(norms_every=case.every) if sharded else Monitor()
        wrapped = er.AdaptiveDataParallel(self.model, optimizer, scaling_rule="none", monitor=monitor)
        loader = er.AdaptiveDataLoader(data(), batch_size=12, seed=3)
        if case.micro is not None and sharded:
            loader.autoscale_batch_size(12, local_bsz_bounds=(1, case.micro), gradient_accumulation=True)
        self.seen: Seen = {}
        self.wanted: dict[int, tuple[list[float], list[float]]] = {}
        for _ in er.remaining_epochs_until(2):
            for x, y in loader:
                step = er.get_context().get_global_step()
                self.freeze(step)
                optimizer.zero_grad()
                for part in range(case.losses):
                    (nn.functional.cross_entropy(wrapped(x), y) * (1 + part)).backward()
                gradients = [] if sharded else self.norms([p.grad for p in group] for group in self.groups)
                if case.clip:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1e-2)
                before = [] if sharded else [[p.detach().clone() for p in group] for group in self.groups]
                optimizer.step()
                outermost = current_session().ledger.outermost
                if outermost is not None and outermost.is_last_micro:
                    self.seen[step] = wrapped.measures.norms
                if not sharded:
                    moved = (
                        [p - old for p, old in zip(*each, strict=True)]
                        for each in zip(self.groups, before, strict=True)
                    )
                    self.wanted[step] = gradients, self.norms(moved)

    def freeze(self, step: int) -> None:
        """One group is trained from step 4 on."""
        for p in self.groups[1] if self.case.frozen else ():
            p.requires_grad_(step >= 4)

    @staticmethod
    def norms(groups: Any) -> list[float]:
        """2-norms by group."""
        return [_norm([each for each in group if each is not None]) for group in groups]


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([torch.zeros(1), *(each.detach().reshape(-1) for each in tensors)]).norm())


_WANTED: dict[Case, dict[int, tuple[list[float], list[float]]]] = {}


def wanted(case: Case) -> dict[int, tuple[list[float], list[float]]]:
    """Norms of gradients and updates, by step, of one process that shards nothing and measures nothing."""
    plain = dataclasses.replace(case, micro=None, every=1, shard_size=None)
    if plain not in _WANTED:
        _WANTED[plain] = run_job(lambda: Loop(plain, sharded=False), first=(1,)).results[1].wanted
    return _WANTED[plain]


def check(
    case: Case, workers: int, script: Any = (), *, late: tuple[int, ...] = (), unsure: tuple[int, ...] = ()
) -> Outcome:
    """Train while the group changes; ``late`` steps, and some ``unsure`` ones, begin groups and miss the one before."""
    found = run_job(lambda: Loop(case, sharded=True), script, first=tuple(range(1, workers + 1)))
    exact, known = wanted(case), dict[int, GradientNorms | None]()
    for own in found.results.values():
        for step, norms in own.seen.items():
            assert known.setdefault(step, norms) == norms, "all ranks know the same"
            newest = step - (1 + (step in late) if workers > 1 else 0)
            newest -= step in unsure and norms is not None and norms.step < newest
            assert (norms.step if norms else None) == (newest // case.every * case.every if newest >= 0 else None)
            if norms is not None:
                gradients, updates = exact[norms.step]
                assert norms.gradients == pytest.approx(gradients, rel=1e-3, abs=1e-7)
                assert norms.updates == pytest.approx(updates, rel=1e-3, abs=1e-7)
    assert known.keys() == set(range(STEPS))
    return found


@pytest.mark.matrix(every=9)
@pytest.mark.parametrize("optimizer", list(MAKERS))
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (4, {"shard_size": 2}),
        (1, {"micro": 5}),
        (2, {"micro": 2}),
        (2, {"frozen": True}),
        (2, {"clip": True}),
        (2, {"losses": 2}),
        (2, {"losses": 2, "micro": 2}),
        (2, {"every": 3}),
    ],
    ids=[
        *("alone", "2", "3", "two shard groups", "accumulated alone", "accumulated", "frozen", "clipped"),
        *("two losses", "two losses accumulated", "every third"),
    ],
)
def test_they_are_those_of_plain_torch(optimizer: str, workers: int, options: dict[str, Any]) -> None:
    check(Case(optimizer, **options), workers)
    if options.get("frozen"):
        before, after = wanted(Case(optimizer, **options))[3], wanted(Case(optimizer, **options))[4]
        assert before[0][1] == before[1][1] == 0 < after[0][1], "a frozen group has no norms"


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("options", [{}, {"shard_size": 2}, {"micro": 2}], ids=["", "shard groups", "accumulated"])
def test_through_changes_of_the_group_nothing_is_mixed(options: dict[str, Any]) -> None:
    """What was measured right before is left out; rank 0 tells what it knew."""
    four = (1, 2, 3, 4) if "shard_size" in options else (1, 2, 3)
    found = check(Case("sgd", **options), 2, [Change(3, four), Change(7, (1, 3)), Change(11, four)], late=(4, 8, 12))
    assert found.groups == [(1, 2), four, (1, 3), tuple(sorted({*four}))]


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize(("moment", "late", "unsure"), [("backward", (5,), ()), ("vote", (), (5, 6))])
def test_lost_worker_takes_no_part_of_sum_with_it(moment: str, late: tuple[int, ...], unsure: tuple[int, ...]) -> None:
    """What was measured in step 4 rides in step 5. Whether a vote was heard decided chance says."""
    check(Case(), 3, [Kill(5, 2, moment)], late=late, unsure=unsure)
    check(Case(shard_size=2), 4, [Kill(5, 1, moment, joins=(5,))], late=late, unsure=unsure)


@pytest.mark.parametrize("make", [Net, sharded_net])
def test_updates_of_different_steps_make_no_norms(make: Any) -> None:
    """Two optimizers that step in turns, one a step, until both do."""

    def norms() -> list[int | None]:
        model = make()
        blocks = list(model.blocks.parameters())
        rest = [p for name, p in model.named_parameters() if "blocks" not in name]
        pair = [torch.optim.AdamW(params, lr=0.01) for params in (blocks, rest)]
        wrapped = er.AdaptiveDataParallel(model, pair, scaling_rule="none", monitor=Monitor(norms_every=1))
        found: list[int | None] = []
        for _ in er.remaining_epochs_until(1):
            for step, (x, y) in enumerate(er.AdaptiveDataLoader(data(), batch_size=12)):
                for each in pair:
                    each.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                for each in pair if step == 3 else [pair[step % 2]]:
                    each.step()
                found.append(None if wrapped.measures.norms is None else wrapped.measures.norms.step)
        return found

    for found in run_job(norms, first=(1, 2)).results.values():
        assert found[:3] == [None] * 3 and set(found[5:]) == {3}
