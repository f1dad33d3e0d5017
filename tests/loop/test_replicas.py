"""Replicas stay identical, or the ranks are told what differs; parameters that are unfrozen are synchronised."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from elastic_ray.state.replicas import Replicas, sum_of_bits
from tests.loop.changing import Change, run_job
from tests.loop.ranks import RankFailedError, Ranks


def rows(count: int = 48) -> TensorDataset:
    """Noisy rows."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def net() -> Any:
    """Three layers, float64 so that sums in another order differ little."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()


@pytest.mark.parametrize("count", [2, 3])
def test_sum_of_bits_is_independent_of_a_tensors_place(count: int) -> None:
    larger = torch.randn(8)
    sums = {
        int(sum_of_bits(larger[at : at + count].clone())) == int(sum_of_bits(larger[at : at + count])) for at in (0, 1)
    }
    assert sums == {True}


# -- identity ------------------------------------------------------------------------------------------------


def another_rate(rank: int, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One rank's learning rate differs from the fourth step on."""
    if rank == 1 and step == 3:
        optimizer.param_groups[0]["lr"] = 0.02


def noise(rank: int, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One rank changes one parameter by the smallest amount there is."""
    if rank == 1 and step == 5:
        with torch.no_grad():
            weight = model[2].weight
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0, dtype=weight.dtype))


def diverging(how: Callable[..., None] | None, epochs: int) -> int:
    """Train; ``how`` may change something at each step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(rows(), batch_size=4)
    context = er.get_context()
    for _epoch in er.remaining_epochs_until(epochs):
        for x, y in loader:
            if how is not None:
                how(context.get_world_rank(), context.get_global_step(), model, optimizer)
            optimizer.zero_grad()
            (wrapped(x.double()) - y).square().mean().backward()
            optimizer.step()
    return context.get_global_step()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (another_rate, r"after 10 steps optimizer\.param_groups\[0\]\['lr'\] is 0\.01 on rank 0 and 0\.02 on rank 1"),
        (noise, r"after 10 steps: 2\.weight\. Everything"),
    ],
)
def test_replicas_that_differ_are_error_that_names_what_differs(ranks: Ranks, how: Any, words: str) -> None:
    with pytest.raises(RankFailedError, match=words):
        ranks.run(diverging, how, 1, world=2)


def late(rank: int, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As `noise`, after the early checks."""
    if rank == 2 and step == 14:
        with torch.no_grad():
            model[4].bias.add_(1e-3)


@pytest.mark.thorough
def test_the_end_of_an_epoch_is_a_check_too(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"rank 2 of 3 no longer holds .* after 24 steps: "):
        ranks.run(diverging, late, 3, world=3)


@pytest.mark.thorough
def test_replicas_that_agree_are_left_alone(ranks: Ranks) -> None:
    assert ranks.run(diverging, None, 10, world=2) == [120, 120]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 64])
def test_a_fingerprint_sees_every_bit(dtype: torch.dtype, size: int) -> None:
    whole = torch.randn(2 * size + 1, dtype=torch.float32).to(dtype)
    layer = nn.Module()
    layer.weight = nn.Parameter(whole[1 : 1 + size])  # not aligned
    layer.other = nn.Parameter(torch.zeros(3, dtype=dtype).expand(2, 3))
    replicas = Replicas()
    replicas.add(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert replicas.due(0) and not replicas.due(7)
    before = replicas.fingerprint(0)
    assert not replicas.due(0, at_end=True), "nothing has changed since"
    assert replicas.due(10) and before == replicas.fingerprint(10) > 0
    if size:
        with torch.no_grad():
            whole[size] = -whole[size]
        assert before != replicas.fingerprint(100)


# -- wrapping twice ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_what_shares_parameters_is_wrapped_once(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"module must be wrapped once.*0\.weight belongs to model 0"):
        ranks.run(twice, "same")
    with pytest.raises(ValueError, match=r"module must be wrapped once.*0\.weight belongs to model 0"):
        ranks.run(twice, "tied")


def twice(which: str) -> None:
    """Wrap a model, and then it or one that is tied to it."""
    model = net()
    er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = model if which == "same" else nn.Sequential(model[0], nn.Linear(6, 2).double())
    er.AdaptiveDataParallel(other, torch.optim.SGD(other.parameters(), lr=0.1))


# -- freezing and unfreezing -----------------------------------------------------------------------------------


def frozen_by(scenario: str, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """What user code does at the beginning of a step."""
    if scenario == "unfreeze" and step == 5:
        model[0].requires_grad_(True)
    elif scenario == "swap" and step == 5:
        model[0].requires_grad_(True)
        for layer in (model[2], model[4]):
            layer.requires_grad_(False)
    elif scenario == "add" and step == 5:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
    elif scenario == "freeze" and step == 5:
        model[2].requires_grad_(False)
    elif scenario == "toggle":
        model[2].requires_grad_(step % 2 == 0)
    elif scenario == "back and forth":
        model[0].requires_grad_(step % 4 > 1)


def thawing(scenario: str, micro: int | None, wrap: bool = True) -> list[torch.Tensor]:
    """Parameters after 12 steps in which some were frozen or unfrozen."""
    model = net()
    if scenario not in ("freeze", "toggle"):
        model[0].requires_grad_(False)
    held = [p for p in model.parameters() if p.requires_grad or scenario != "add"]
    optimizer = torch.optim.Adam(held, lr=0.05)
    trained = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none") if wrap else model
    loader = er.AdaptiveDataLoader(rows(), batch_size=8, seed=3)
    if micro is not None:
        loader.autoscale_batch_size(8, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    session, steps = current_session(), 0
    for _epoch in er.remaining_epochs_until(2):
        for x, y in loader:
            if session.ledger.outermost.micro == 0:
                frozen_by(scenario, steps, model, optimizer)
                steps += 1
            optimizer.zero_grad()
            (trained(x.double()) - y).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("scenario", ["unfreeze", "swap", "add", "freeze", "toggle", "back and forth"])
def test_parameters_are_trained_as_one_process_would(ranks: Ranks, scenario: str, micro: int | None) -> None:
    alone = ranks.run(thawing, scenario, None, False)
    both = ranks.run(thawing, scenario, micro, world=2)
    for first, second, wanted in zip(*both, alone, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, wanted, rtol=1e-6, atol=1e-8)


def test_an_unfrozen_parameter_needs_an_optimizer() -> None:
    set_session(None)
    model = net()
    model[0].requires_grad_(False)
    wrapped = er.AdaptiveDataParallel(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight became trainable after.*add_param_group.*freeze them afterwards"):
        wrapped(torch.zeros(2, 4).double())


def test_what_was_unfrozen_reaches_a_joiner() -> None:
    """Its own code has not come by the place where the others have."""
    captured = []
    for unfreezes in (True, False):
        set_session(None)
        model = net()
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        if unfreezes:
            model[0].requires_grad_(True)
            model[4].bias.requires_grad_(False)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
            wrapped(torch.zeros(2, 4).double())
        captured.append((current_session().states._states["optimizer/0"], model, optimizer))
    set_session(None)
    (holder, _, _), (joiner, model, optimizer) = captured
    joiner.restore(holder.capture())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["4.bias"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert joiner.capture() == holder.capture()


def test_not_all_short_passes_are_followed_by_a_check() -> None:
    replicas = Replicas()
    layer = nn.Linear(2, 1)
    replicas.add(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    checked = []
    for steps in range(5, 1005, 5):
        if replicas.due(steps, at_end=True):
            replicas.fingerprint(steps)
            checked.append(steps)
    assert checked[:4] == [5, 10, 15, 20] and 1000 in checked
    gaps = [after - before for before, after in itertools.pairwise(checked)]
    assert max(gaps) == 100 and len(checked) < 30
    replicas.start(1000)
    assert replicas.due(1001, at_end=True), "the first pass in a group is"


def test_a_group_s_first_steps_are_followed_by_checks() -> None:
    replicas = Replicas()
    layer = nn.Linear(2, 1)
    replicas.add(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    replicas.start(217)
    checked = []
    for steps in range(217, 420):
        if steps >= replicas.next_check and replicas.due(steps):
            replicas.fingerprint(steps)
            checked.append(steps)
    assert checked == [218, 227, 300, 400]


# -- training that is not the same -------------------------------------------------------------------------------


def freezes(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One layer is trained no more."""
    model[2].weight.requires_grad_(False)


def stays_in_eval(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Dropout does nothing."""
    model[1].eval()


def another_option(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """An option that has no effect on what is there."""
    optimizer.param_groups[0]["foreach"] = False


def another_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Another decay, which makes the parameters differ as well."""
    optimizer.param_groups[0]["weight_decay"] = 0.1


def trained_otherwise(how: Callable[..., None], models: int = 1) -> str:
    """What a rank is told; one of them changes something in the second epoch, and nothing differs until then."""
    rank = er.get_context().get_world_rank()
    nets = [net() for _ in range(models)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in nets]
    wrapped = [er.AdaptiveDataParallel(*pair) for pair in zip(nets, optimizers, strict=True)]
    loader = er.AdaptiveDataLoader(rows(), batch_size=4)
    try:
        for epoch in er.remaining_epochs_until(3):
            if epoch == 1 and rank == 1:
                how(nets[-1], optimizers[-1])
            for x, y in loader:
                for model, optimizer in zip(wrapped, optimizers, strict=True):
                    optimizer.zero_grad()
                    (model(x.double()) - y).square().mean().backward()
                    optimizer.step()
    except er.errors.ReplicasDifferError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (freezes, "2.weight.requires_grad is True on rank 0 and False on rank 1"),
        (stays_in_eval, "1.training is True on rank 0 and False on rank 1"),
        (another_option, "optimizer.param_groups[0]['foreach'] is 'None' on rank 0 and False on rank 1"),
        (another_group, "optimizer.param_groups[0]['weight_decay'] is 0 on rank 0 and 0.1 on rank 1"),
    ],
)
def test_replicas_trained_otherwise_are_an_error_naming_the_option(ranks: Ranks, how: Any, words: str) -> None:
    for told in ranks.run(trained_otherwise, how, world=2):
        assert words in told and "after 24 steps" in told


def test_rank_may_evaluate_alone_and_keep_its_best_model(ranks: Ranks) -> None:
    """As programs for one process do with ``if rank == 0``; each epoch begins with ``train()``."""
    assert ranks.run(evaluates_alone, world=2) == [16] * 2


def evaluates_alone() -> int:
    """Steps until rank 0's evaluations end the training of all, with a model that rank 0 alone takes back."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    session = current_session()
    for epoch in er.remaining_epochs_until(9):
        best = {name: p.clone() for name, p in model.state_dict().items()}
        for number, (x, y) in enumerate(er.AdaptiveDataLoader(rows(), batch_size=12)):
            model.train()
            optimizer.zero_grad()
            (wrapped(x.double()) - y).square().mean().backward()
            optimizer.step()
            if number == 3 and session.rank == 0:
                model.eval()
        if session.rank == 0:
            model.eval()
            for p in model.parameters():
                p.requires_grad_(epoch < 3)
        if epoch == 3:
            if session.rank == 0:
                model.load_state_dict(best)
            break
    session.finish()
    return session.progress.steps


def test_of_several_models_that_is_named(ranks: Ranks) -> None:
    for told in ranks.run(trained_otherwise, freezes, 2, world=2):
        assert "model 1: 2.weight.requires_grad is True on rank 0" in told


def adding(how: str) -> str:
    """What a rank is told that does not clear its gradients, or adds to them more often."""
    rank = er.get_context().get_world_rank()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(rows(), batch_size=7 if how == "uneven" else 4)

    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        (wrapped(x.double()) - y).square().mean().backward()

    try:
        for _epoch in er.remaining_epochs_until(1):
            for number, (x, y) in enumerate(loader):
                if not (how == "left" and rank == 1 and number >= 2) and how != "nobody":
                    optimizer.zero_grad(set_to_none=how != "zeros")
                more = {"no_sync": rank == 1 and number == 3, "uneven": len(x) > 3}.get(
                    how, how == "all" or number == 1
                )
                with wrapped.no_sync():
                    for _ in range(1 + more):
                        add(x, y)
                add(x, y)
                optimizer.step()
    except er.errors.RanksDisagreeError as error:
        return str(error)
    return ""


def test_gradients_that_do_not_belong_together_are_an_error(ranks: Ranks) -> None:
    for told in ranks.run(adding, "left", world=2):
        assert "rank 1 reduces gradients, on top of those of the last update" in told and "in step 2 " in told


def by_tokens() -> list[tuple[float, float]]:
    """A rank's gradients before they are averaged, and after: it cuts its share into as many passes as it likes."""
    rank = er.get_context().get_world_rank()
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    found = []
    for _ in er.remaining_epochs_until(1):
        for number, (x, _y) in enumerate(er.AdaptiveDataLoader(rows(), batch_size=4, shuffle=False)):
            optimizer.zero_grad()
            own = 0.0
            with wrapped.no_sync():
                for _ in range(rank * (1 + number % 3)):
                    wrapped(x[:, :1].float()).sum().backward()
                    own += float(x[:, :1].float().sum())
            wrapped(x[:, :1].float()).sum().backward()
            found.append((own + float(x[:, :1].float().sum()), float(model.weight.grad)))
            optimizer.step()
    return found


def test_ranks_add_up_over_any_number_of_passes(ranks: Ranks) -> None:
    """As under DDP, which averages what each rank has added up."""
    first, second = ranks.run(by_tokens, world=2)
    assert len(first) > 3
    for (own, mean), (other, same) in zip(first, second, strict=True):
        assert mean == same == pytest.approx((own + other) / 2)


@pytest.mark.parametrize("how", ["zeros", "nobody", "all", "uneven", "no_sync"])
def test_what_all_ranks_do_to_gradients_is_theirs(ranks: Ranks, how: str) -> None:
    assert ranks.run(adding, how, world=2) == [""] * 2


# -- the last steps, checkpoints and changes of the group ----------------------------------------------------------


def apart(epochs: int, at: int, leaves: int, saves: int = 0) -> tuple[str, int]:
    """What a rank is told, and after how many steps; rank 1 comes apart by a bit at step ``at``."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(rows(), batch_size=4)
    session = current_session()
    try:
        for epoch in er.remaining_epochs_until(epochs):
            for x, y in loader:
                if session.progress.steps == at:
                    noise(session.rank, 5, model, optimizer)
                if session.progress.steps == saves > 0 == session.rank:
                    session.count_report(saves=True)
                optimizer.zero_grad()
                (wrapped(x.double()) - y).square().mean().backward()
                optimizer.step()
            if epoch == leaves:
                break
        with torch.no_grad():
            model[0].weight[0] += session.rank  # the job's result is rank 0's: others may do as they like with theirs
        session.finish()
    except er.errors.ReplicasDifferError as error:
        return str(error), session.progress.steps
    return "", session.progress.steps


def test_ranks_that_come_apart_in_last_epoch_are_found(ranks: Ranks) -> None:
    for told, steps in ranks.run(apart, 10, 115, -1, world=2):
        assert "after 120 steps: 2.weight" in told and steps == 120


def test_so_are_they_where_the_loop_is_left_earlier(ranks: Ranks) -> None:
    for told, steps in ranks.run(apart, 20, 115, 9, world=2):
        assert (
            "when the loop over epochs was left, rank(s) 1 held or trained parameters differently" in told
            and steps == 120
        )


def test_behind_the_loop_each_rank_may_change_its_own(ranks: Ranks) -> None:
    assert ranks.run(apart, 10, -1, -1, world=2) == [("", 120)] * 2
    assert ranks.run(apart, 20, -1, 3, world=2) == [("", 48)] * 2


def test_a_reported_checkpoint_is_a_check(ranks: Ranks) -> None:
    for told, steps in ranks.run(apart, 20, 122, -1, 123, world=2):
        assert "after 124 steps: 2.weight" in told and steps == 124


def test_a_change_of_the_group_is_a_check() -> None:
    def train() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        session = current_session()
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(rows(), batch_size=4):
                if session.progress.steps == 3:
                    noise(session.rank, 5, model, optimizer)
                optimizer.zero_grad()
                (wrapped(x.double()) - y).square().mean().backward()
                optimizer.step()

    with pytest.raises(er.errors.ReplicasDifferError, match=r"after 6 steps: 2\.weight"):
        run_job(train, [Change(5, (1, 2, 3))], first=(1, 2))


def test_joiner_that_counts_for_itself_is_found_at_once() -> None:
    def train() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        for _ in er.remaining_epochs_until(1):
            for number, (x, y) in enumerate(er.AdaptiveDataLoader(rows(), batch_size=4)):
                optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
                optimizer.zero_grad()
                (wrapped(x.double()) - y).square().mean().backward()
                optimizer.step()

    with pytest.raises(er.errors.ReplicasDifferError, match=r"after 4 steps .*\['lr'\] .*get_global_step"):
        run_job(train, [Change(2, (1, 2)), Change(5, (2,))])


def reporting(ranks_that_do: tuple[int, ...]) -> list[str]:
    """What the job's user is told where only these ranks report."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    session, told = current_session(), list[str]()
    session.controller.notify = lambda kind, text, detail: told.append(text)
    for _ in er.remaining_epochs_until(5):
        for x, y in er.AdaptiveDataLoader(rows(), batch_size=24):
            optimizer.zero_grad()
            (wrapped(x.double()) - y).square().mean().backward()
            optimizer.step()
        if session.rank in ranks_that_do:
            er.report({"rank": session.rank})
    return told


def test_reports_of_other_ranks_alone_are_warned_of(ranks: Ranks) -> None:
    first, second = ranks.run(reporting, (1,), world=2)
    assert not first and len(second) == 1 and "metrics are recorded from rank 0 alone" in second[0]
    assert ranks.run(reporting, (0, 1), world=2) == [[], []] == ranks.run(reporting, (0,), world=2)


@pytest.mark.parametrize(("checked", "first"), [(40, 50), (8, 10), (1000, 1100)])
def test_a_pass_ends_with_a_check_after_enough_steps(checked: int, first: int) -> None:
    model = net()
    replicas = Replicas()
    replicas.add(model, torch.optim.SGD(model.parameters(), lr=0.1))
    replicas.fingerprint(checked)
    assert [replicas.due(steps, at_end=True) for steps in (first - 1, first, first + 1)] == [False, True, True]
    assert not replicas.due(checked, always=True), "it was just made"
