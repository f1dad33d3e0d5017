"""Gradients that are NaN or infinite on one rank are seen on all, told once, and handled as the user chose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.parallel.nonfinite import describe_gradients
from tests.loop.changing import Kill, run_job
from tests.loop.ranks import RankFailedError, Ranks

BAD_AT = (3, 4, 7)


def rows(count: int) -> TensorDataset:
    """The same on every rank."""
    return TensorDataset(torch.randn(count, 2, generator=torch.Generator().manual_seed(5)))


def train(nonfinite: str, bad_rank: int, value: float, micro: int | None = None, adam: bool = True) -> dict[str, Any]:
    """Twelve steps; in some of them one rank's loss is not finite."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01) if adam else torch.optim.SGD(model.parameters(), 0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, nonfinite=nonfinite)
    loader = er.AdaptiveDataLoader(rows(96), batch_size=8)
    if micro is not None:
        loader.autoscale_batch_size(8, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    session = current_session()
    told: list[tuple[str, str, Any]] = []
    session.controller.notify = lambda kind, text, detail: told.append((kind, text, dict(detail)))
    error = ""
    try:
        for _epoch in er.remaining_epochs_until(1):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = wrapped(x).square().mean()
                step = session.ledger.outermost
                if session.progress.steps in BAD_AT and session.rank == bad_rank and step.micro == 0:
                    loss = loss * value
                loss.backward()
                optimizer.step()
        session.finish()
    except FloatingPointError as raised:
        error = f"{type(raised).__name__}: {raised}"
    state = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {"told": told, "error": error, "state": state, "noise": wrapped.noise_scale, "steps": session.progress.steps}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(("world", "micro"), [(None, None), (None, 2), (2, None), (2, 1), (3, None)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_updates_that_are_not_finite_can_be_left_out(
    ranks: Ranks, world: int | None, micro: int | None, value: float
) -> None:
    bad_rank = 0 if world is None else 1
    results = ranks.run(train, "skip", bad_rank, value, micro, world=world)
    for result in [results] if world is None else results:
        assert result["error"] == ""
        assert result["state"].isfinite().all() and result["steps"] == 12
        assert result["noise"] is None or result["noise"].var == result["noise"].var
    first = results if world is None else results[0]
    where = "" if world is None else " on rank 1"
    assert [text for _, text, _ in first["told"]] == [
        f"gradients of model 0 were NaN or infinite{where} in step {step}; the update was left out" for step in (3, 7)
    ]
    assert {kind for kind, _, _ in first["told"]} == {"not_finite"}
    assert first["told"][0][2] == {"step": 3, "ranks": [] if world is None else [1], "model": 0}
    for other in [] if world is None else results[1:]:
        assert other["told"] == [] and torch.equal(other["state"], first["state"])


@pytest.mark.parametrize("world", [None, 2])
def test_by_default_they_are_told_and_fail_the_job(ranks: Ranks, world: int | None) -> None:
    results = ranks.run(train, "warn", 0, float("nan"), world=world)
    first = results if world is None else results[0]
    assert len(first["told"]) == 1 and first["told"][0][1].endswith("in step 3; they were applied")
    for result in [results] if world is None else results:
        assert result["error"].startswith(
            "NonFiniteParametersError: training has ended with parameters or buffers of model 0"
        )
        assert "0.weight" in result["error"]


@pytest.mark.parametrize("world", [None, 2])
def test_they_can_end_the_training_at_once(ranks: Ranks, world: int | None) -> None:
    results = ranks.run(train, "raise", 0, float("inf"), world=world)
    for result in [results] if world is None else results:
        assert result["steps"] == 3 and result["state"].isfinite().all()
        assert result["error"].startswith("NonFiniteGradientsError: gradients of model 0 were NaN or infinite")


def test_ignored_values_reach_the_parameters(ranks: Ranks) -> None:
    for result in ranks.run(train, "ignore", 0, float("nan"), world=2):
        assert (result["told"], result["error"]) == ([], "") and result["state"].isnan().any()


def normalised(kind: str, nonfinite: str, bad_rank: int, finishes: bool = True) -> dict[str, Any]:
    """Bad samples go through BatchNorm; `kind` says how the loop adds up gradients, `finishes` who ends the run."""
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if kind == "amp" else None
    wrapped = er.AdaptiveDataParallel(model, optimizer, grad_scaler=scaler, nonfinite=nonfinite)
    loader = er.AdaptiveDataLoader(rows(96), batch_size=8)
    if kind == "micro-steps":
        loader.autoscale_batch_size(8, local_bsz_bounds=(1, 2), gradient_accumulation=True)
    session = current_session()
    seen: list[int] = []  # batches that the statistics hold
    error = ""
    try:
        for _epoch in er.remaining_epochs_until(1):
            for (x,) in loader:
                step = session.progress.steps
                if kind == "by hand" and step % 3 == 0:
                    optimizer.zero_grad()
                if step in BAD_AT and session.rank == bad_rank and session.ledger.outermost.micro == 0:
                    x = x * float("nan")
                if kind != "by hand":
                    optimizer.zero_grad()
                loss = wrapped(x).square().mean()
                if scaler is not None:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    if kind != "by hand" or step % 3 == 2:
                        optimizer.step()
                seen.append(int(norm.num_batches_tracked))
        if finishes:
            session.finish()
    except FloatingPointError as raised:
        error = str(raised)
    return {"seen": seen, "error": error, "buffers": [b.clone() for b in model.buffers()]}


@pytest.mark.parametrize("kind", ["plain", "by hand", "micro-steps", "amp"])
@pytest.mark.parametrize("world", [None, 2])
def test_an_update_that_is_left_out_leaves_no_statistics(ranks: Ranks, world: int | None, kind: str) -> None:
    results = ranks.run(normalised, kind, "skip", 0 if world is None else 1, world=world)
    batches = {"plain": 9, "amp": 9, "by hand": 6, "micro-steps": 9 * (4 if world is None else 2)}[kind]
    for rank, result in enumerate([results] if world is None else results):
        assert result["error"] == "" and all(buffer.isfinite().all() for buffer in result["buffers"])
        if kind != "amp" or rank == (world or 1) - 1:  # what the scaler leaves out harms the bad rank's alone
            assert result["seen"][-1] == batches


def two_models(_: int) -> list[torch.Tensor]:
    """A generator's bad output passes through the discriminator's BatchNorm as well."""
    torch.manual_seed(1)
    g, d = nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    opt_g, opt_d = (torch.optim.SGD(each.parameters(), 0.01) for each in (g, d))
    wrapped_g = er.AdaptiveDataParallel(g, opt_g, nonfinite="skip")
    wrapped_d = er.AdaptiveDataParallel(d, opt_d, nonfinite="skip")
    session = current_session()
    for _epoch in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(rows(96), batch_size=8):
            opt_d.zero_grad()
            wrapped_d(x).square().mean().backward()
            opt_d.step()
            bad = session.progress.steps in BAD_AT and session.rank == 0
            opt_g.zero_grad()
            wrapped_d(wrapped_g(x) * (float("nan") if bad else 1.0)).square().mean().backward()
            opt_g.step()
    session.finish()
    return [b.clone() for b in d.buffers()]


@pytest.mark.parametrize("world", [None, 2])
def test_nor_do_they_stay_in_another_model(ranks: Ranks, world: int | None) -> None:
    results = ranks.run(two_models, 0, world=world)
    for buffers in [results] if world is None else results:
        assert all(buffer.isfinite().all() for buffer in buffers) and int(buffers[2]) == 12 + 9


@pytest.mark.parametrize("moment", ["backward", "edge"])
def test_nor_do_those_of_lost_step_reach_other_ranks(moment: str) -> None:
    outcome = run_job(lambda: normalised("plain", "skip", 0, finishes=False), [Kill(4, 2, moment)], first=(1, 2, 3))
    for result in outcome.results.values():
        assert result["error"] == "" and all(buffer.isfinite().all() for buffer in result["buffers"])


@pytest.mark.parametrize("world", [None, 2])
def test_other_choices_leave_the_statistics_alone(ranks: Ranks, world: int | None) -> None:
    results = ranks.run(normalised, "plain", "warn", 0, world=world)
    for result in [results] if world is None else results:
        assert "parameters or buffers" in result["error"] and result["seen"][-1] == 12


def scaled(fused: bool, nonfinite: str) -> dict[str, Any]:
    """A loss scale that is far too high at first, as always with AMP."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    wrapped = er.AdaptiveDataParallel(model, optimizer, grad_scaler=scaler, nonfinite=nonfinite)
    loader = er.AdaptiveDataLoader(rows(64), batch_size=8)
    session = current_session()
    told: list[str] = []
    session.controller.notify = lambda kind, text, detail: told.append(text)
    for _epoch in er.remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            scaler.scale(wrapped(x * 100).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    session.finish()
    return {"told": told, "scale": scaler.get_scale(), "state": [p.detach().clone() for p in model.parameters()]}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("nonfinite", ["warn", "raise", "skip"])
@pytest.mark.parametrize("world", [None, 2])
def test_what_amp_leaves_out_is_no_fault(ranks: Ranks, world: int | None, nonfinite: str, fused: bool) -> None:
    results = ranks.run(scaled, fused, nonfinite, world=world)
    for result in [results] if world is None else results:
        assert result["told"] == [] and result["scale"] < 2.0**127
        assert all(p.isfinite().all() for p in result["state"])


def test_an_unknown_choice_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="nonfinite must be one of warn, skip, raise, ignore, but got 'stop'"):
        er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), 0.1), nonfinite="stop")


def test_ranks_are_named_where_they_are_known() -> None:
    assert describe_gradients(1, 9, [0, 2], "raise") == (
        "gradients of model 1 were NaN or infinite on ranks 0, 2 in step 9; training ends"
    )


# -- training that nobody synchronises -------------------------------------------------------------------------


def unwrapped(which: str) -> list[str]:
    """Train something that is not wrapped, or on samples that no adaptive loader gives."""
    torch.manual_seed(1)
    told: list[str] = []
    session = current_session()
    session.controller.notify = lambda kind, text, detail: told.append(text)
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, stranger = (torch.optim.SGD(each.parameters(), 0.01) for each in (model, other))
    wrapped = er.AdaptiveDataParallel(model, optimizer) if which != "none" else model
    dataset = rows(24)
    loader = er.AdaptiveDataLoader(dataset, batch_size=8)
    stranger.step()  # what all workers do alike before they join is theirs
    for _epoch in er.remaining_epochs_until(2):
        if which == "own":
            stranger = torch.optim.SGD(other.parameters(), 0.01)
        for (x,) in loader if which != "plain" else torch.utils.data.DataLoader(dataset, batch_size=8):
            optimizer.zero_grad()
            wrapped(x).sum().backward()
            optimizer.step()
            if which in ("beside", "own"):
                stranger.zero_grad()
                other(x).sum().backward()
                stranger.step()
    return told


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("none", "SGD steps parameters that AdaptiveDataParallel does not know"),
        ("beside", "make the optimizer within the epochs"),
    ],
)
def test_a_model_that_is_not_wrapped_is_an_error(ranks: Ranks, which: str, words: str) -> None:
    with pytest.raises(RankFailedError, match=words):
        ranks.run(unwrapped, which, world=2)
    assert ranks.run(unwrapped, which) == []  # alone it is


@pytest.mark.parametrize(
    ("which", "words"),
    [("own", "SGD steps parameters that"), ("plain", "trained outside of a loop over an AdaptiveDataLoader")],
)
def test_training_that_is_not_shared_is_warned_of_once(ranks: Ranks, which: str, words: str) -> None:
    first, second = ranks.run(unwrapped, which, world=2)
    assert len(first) == 1 and words in first[0]
    assert second == []
