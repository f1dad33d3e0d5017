"""Groups that were started by srun, mpirun or by hand: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and no store."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.standalone.session import own_gpu
from elastic_ray.state.layout import difference, packed
from tests.loop.ports import free_port
from tests.loop.ranks import Ranks


def plainly(port: int) -> None:
    """Make this rank's environment what srun's prolog makes it: nobody holds a store."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_") or name == "LOCAL_WORLD_SIZE"]:
        del os.environ[name]
    os.environ["MASTER_PORT"] = str(port)


def train(port: int) -> Any:
    """One epoch; the parameters afterwards, the samples that this rank has seen, and where rank 0's store listens."""
    import psutil

    plainly(port)
    data = torch.arange(24.0).reshape(24, 1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(data), batch_size=8, shuffle=True)
    seen = []
    for _ in er.remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            seen += x.flatten().tolist()
    listens = [
        each.laddr.ip
        for each in psutil.Process().net_connections("tcp")
        if each.status == "LISTEN" and each.laddr.port == port
    ]
    return [p.tolist() for p in model.parameters()], seen, listens


def test_rank_0_holds_store_at_the_masters_address_alone(ranks: Ranks) -> None:
    (first, seen, listens), (second, seen_there, none) = ranks.run(train, free_port(), world=2)
    assert first == second and sorted(seen + seen_there) == list(range(24)), "each sample once"
    assert listens == ["127.0.0.1"] and none == []


def beside_a_group_of_torch_s_own(port: int) -> Any:
    plainly(port)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method="env://")
    try:
        return train(port)[0]
    finally:
        torch.distributed.destroy_process_group()


def test_a_store_that_torch_holds_already_is_shared(ranks: Ranks) -> None:
    first, second = ranks.run(beside_a_group_of_torch_s_own, free_port(), world=2)
    assert first == second


def twice(port: int) -> Any:
    from elastic_ray.run.current import set_session

    results = [train(port)[0]]
    set_session(None)
    return [*results, train(port)[0]]


def test_second_run_in_the_processes_forms_its_own_group(ranks: Ranks) -> None:
    first, second = ranks.run(twice, free_port(), world=2)
    assert first == second and len(first) == 2


def without(absent: int, port: int) -> Any:
    from elastic_ray.standalone import session as standalone

    if int(os.environ["RANK"]) == absent:
        return None
    standalone._FORM_TIMEOUT_S = 2.0
    begin_s = time.monotonic()
    try:
        train(port)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin_s
    finally:
        standalone._FORM_TIMEOUT_S = 60.0
    return "trained alone"


@pytest.mark.thorough
@pytest.mark.parametrize("absent", [0, 1])
def test_rank_that_never_comes_is_error_within_the_deadline(ranks: Ranks, absent: int) -> None:
    outcome = ranks.run(without, absent, free_port(), world=2)[1 - absent]
    name, message, took_s = outcome
    assert name == "LostGroupError" and took_s < 20.0, outcome
    assert "the group of WORLD_SIZE=2 processes did not form within 2 s" in message
    assert "the same MASTER_ADDR and MASTER_PORT" in message


def test_ranks_meet_at_new_port_after_waiting_in_vain(ranks: Ranks) -> None:
    ranks.run(without, 1, free_port(), world=2)
    parameters = [rank[0] for rank in ranks.run(train, free_port(), world=2)]
    assert parameters[0] == parameters[1]


def with_models_of_their_own(port: int, what: str) -> Any:
    plainly(port)
    other = os.environ["RANK"] == "1"
    model: Any = torch.nn.Linear(1, 2 if other and what == "shape" else 1)
    if other and what == "parameters":
        model = torch.nn.Sequential(model, torch.nn.Linear(1, 1))
    kind: Any = torch.optim.Adam if other and what == "optimizer" else torch.optim.SGD
    begin_s = time.monotonic()
    try:
        optimizer = kind(model.parameters(), lr=1e-3)
        model = er.AdaptiveDataParallel(model, optimizer)
        if other and what == "models":
            second = torch.nn.Linear(1, 1)
            er.AdaptiveDataParallel(second, torch.optim.SGD(second.parameters(), lr=1e-3))
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(24, 1)), batch_size=8)
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - begin_s
    return "trained"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("shape", "model/0: bias is (1,) torch.float32 on rank 0 and (2,) torch.float32 on rank 1"),
        ("parameters", "is missing on rank 0 and (1,) torch.float32 on rank 1"),
        ("optimizer", "optimizer/0 is SGD on rank 0 and Adam on rank 1"),
        ("models", "optimizer/1 is missing on rank 0 and SGD on rank 1"),
    ],
)
def test_ranks_that_build_different_things_all_learn_what_differs(ranks: Ranks, what: str, told: str) -> None:
    for name, message, took_s in ranks.run(with_models_of_their_own, free_port(), what, world=2):
        assert name == "ReplicasDifferError" and told in message
        assert took_s < 30.0


def test_a_difference_names_the_first_few() -> None:
    one, other = ({f"p{i}": f"({i},)" for i in range(count)} for count in (2, 9))
    text = difference({3: packed(other), 0: packed(one)})
    assert "p2 is missing on rank 0 and (2,) on rank 3; " in text and text.endswith(
        "p6 is missing on rank 0 and (6,) on rank 3; and 2 more"
    )


def test_what_a_loop_tracks_alone_lies_outside_packages(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_RAY_TRACKER_DIR", raising=False)
    assert Path(er.get_tracker_dir()) == tmp_path / "runs" / "user"
    monkeypatch.setenv("ELASTIC_RAY_TRACKER_DIR", str(tmp_path / "there"))
    assert Path(er.get_tracker_dir()) == tmp_path / "there" and (tmp_path / "there").is_dir()


@pytest.mark.parametrize(
    ("local_rank", "chosen", "count", "gpu"), [(0, 0, 1, 0), (2, 0, 4, 2), (5, 0, 4, 1), (0, 3, 4, 3), (1, 2, 4, 2)]
)
def test_gpu_that_user_code_has_chosen_stays_present_one(local_rank: int, chosen: int, count: int, gpu: int) -> None:
    assert own_gpu(local_rank, chosen, count) == gpu
