"""What a wrapper cannot do is said with the way out, at once or in the first backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.run.current import set_session
from elastic_ray.session.default_group import install
from tests.loop.alone import session_of
from tests.loop.ranks import RankFailedError, Ranks


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    """Each test runs alone."""
    set_session(None)
    yield
    set_session(None)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("find_unused_parameters", "not needed.*parameters that a step does not use are always handled"),
        ("device_ids", "not needed.*trains on the device that it is on"),
        ("output_device", "not needed"),
        ("gradient_as_bucket_view", "not needed"),
        ("static_graph", "not needed"),
        ("process_group", "the group is the job's"),
        ("broadcast_buffers", "averaged over the workers"),
        ("bucket_cap_mb", "not needed"),
        ("colour", "no argument 'colour'; it has module, optimizer, lr_scheduler"),
    ],
)
def test_options_of_ddp_have_an_answer(option: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        er.AdaptiveDataParallel(*parts(), **{option: True})


def test_a_graph_of_one_shape_is_refused_in_jobs() -> None:
    model, optimizer = parts()

    def make_graphed_callables(layer: nn.Module) -> None:  # torch's captures on a GPU alone; what it leaves looks so
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x

        layer.forward = forward

    make_graphed_callables(model[1])
    model[1].forward.__qualname__ = "make_graphed_callables.<locals>.make_graphed_forward.<locals>.new_fwd"
    er.AdaptiveDataParallel(model, optimizer)  # alone the shape is the user's
    session_of()
    with pytest.raises(ValueError, match=r"^1 was captured by .*make_graphed_callables.*reduce-overhead"):
        er.AdaptiveDataParallel(*(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_a_model_of_dtensors_is_refused_without_units() -> None:
    model, _ = parts()
    session_of()
    install()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"0.weight is a DTensor.*unit=elastic_ray.Unit.*docs/units.md"):
        er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_optimizers_that_step_no_sparse_gradients_are_refused(layer: Any) -> None:
    model = nn.Sequential(layer(5, 3, sparse=True), nn.Linear(3, 1))
    er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = nn.Sequential(layer(5, 3, sparse=True), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"AdamW cannot step the sparse gradient of 0\.weight.*update='dense'"):
        er.AdaptiveDataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def test_an_optimizer_in_a_hook_is_refused() -> None:
    model, optimizer = parts()
    own = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: torch.Tensor) -> None:
        own[param].step()
        own[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    with pytest.raises(ValueError, match=r"a hook on the gradient of 0\.weight steps an optimizer.*after backward"):
        er.AdaptiveDataParallel(model, optimizer)


def trains(way: str) -> None:
    """Does in its first backward pass what cannot be seen before."""
    model: Any
    model, _ = parts()
    table = nn.Parameter(torch.randn(4, 2))
    model.register_parameter("table", table)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holder = {"step": optimizer.step}
    if way == "zero":
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    if way == "step":
        holder["step"] = optimizer.step
        table.register_post_accumulate_grad_hook(lambda _: holder["step"]())
    loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(8) % 4), batch_size=4)
    for _epoch in er.remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            rows = nn.functional.embedding(x, table, sparse=way == "sparse")
            wrapped(rows).sum().backward()
            optimizer.step()


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("sparse", "is sparse, but no layer.*a rule of elastic_ray.sync.spec.Rows.*sparse=False"),
        ("zero", "a hook has removed it.*Step one optimizer of all parameters after"),
        ("step", r"optimizer\.step\(\) was called within backward\(\).*Step one optimizer of all parameters after"),
    ],
)
@pytest.mark.parametrize("world", [None, 2])
def test_the_first_backward_pass_says_so(ranks: Ranks, world: int | None, way: str, words: str) -> None:
    with pytest.raises(RuntimeError if world is None else RankFailedError, match=words):
        ranks.run(trains, way, world=world)
