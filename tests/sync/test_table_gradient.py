"""User code sees the gradients of tables under Rows as it always does, whatever it does with them."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ray.sync.engine.trainable import profile_of
from elastic_ray.sync.tables.table_gradient import TableGradient

TABLE, WIDTH = 30, 3


class Pair:
    """The same layer twice: followed, and as torch has it."""

    def __init__(self, update: str = "auto", kind: Any = nn.Embedding, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = kind(TABLE, WIDTH, **options)
        self.layer = copy.deepcopy(self.plain)
        self.table = TableGradient(self.layer.weight, update)
        self.table.adapt([self.layer])

    def backward(self, ids: Tensor) -> None:
        for layer in (self.plain, self.layer):
            layer(ids).square().sum().backward()

    def check(self) -> None:
        mine, wanted = self.layer.weight.grad, self.plain.weight.grad
        assert (mine is None) == (wanted is None)
        if wanted is not None:
            assert mine.layout == wanted.layout
            torch.testing.assert_close(mine, wanted)
            torch.testing.assert_close(self.table.rows().to_dense(), wanted.to_dense())


def ids(*shape: int) -> Tensor:
    """At random."""
    return torch.randint(TABLE, shape or (2, 3))


STEPS: list[Any] = [
    lambda pair: pair.backward(ids()),
    lambda pair: pair.backward(ids()),
    lambda pair: [layer.zero_grad() for layer in (pair.plain, pair.layer)],
    lambda pair: [layer.zero_grad(set_to_none=False) for layer in (pair.plain, pair.layer)],
    lambda pair: [nn.utils.clip_grad_norm_(layer.parameters(), 0.1) for layer in (pair.plain, pair.layer)],
    lambda pair: [(layer.weight * 2).sum().backward() for layer in (pair.plain, pair.layer)],
    lambda pair: pair.table.write(pair.table.rows(), sparse=False) if pair.plain.weight.grad is not None else None,
]


@pytest.mark.parametrize("seed", range(30))
def test_dense_gradients_are_dense_and_right(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    pair = Pair(padding_idx=seed % 2 or None)
    for _ in range(12):
        random.choice(STEPS)(pair)
        pair.check()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str) -> None:
    pair = Pair(kind=nn.EmbeddingBag, mode=mode)
    for _ in range(3):
        pair.backward(ids())
        pair.check()


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("update", ["sparse", "dense"])
def test_an_update_s_layout(update: str, sparse: bool) -> None:
    pair = Pair(update, sparse=sparse)
    for _ in range(3):
        pair.backward(ids())
        grad = pair.layer.weight.grad
        assert grad.is_sparse == (update == "sparse")
        torch.testing.assert_close(grad.to_dense(), pair.plain.weight.grad.to_dense())


def test_sparse_layers_stay_as_they_are() -> None:
    pair = Pair(sparse=True)
    pair.backward(ids())
    pair.check()
    assert not pair.layer._forward_hooks and pair.layer.weight.grad.is_sparse


def test_memory_is_used_again_and_only_rows_are_written() -> None:
    pair = Pair()
    places = set()
    for _ in range(4):
        pair.layer.zero_grad()
        pair.layer(ids()).sum().backward()
        places.add(pair.layer.weight.grad.data_ptr())
        assert pair.table.rows().count <= 6
    assert len(places) == 1


@pytest.mark.parametrize("keep", [lambda grad: grad, lambda grad: grad[2:], lambda grad: grad.detach().numpy()])
def test_gradients_that_user_code_keeps_stay(keep: Any) -> None:
    pair = Pair()
    pair.backward(ids())
    kept = keep(pair.layer.weight.grad)
    before = torch.as_tensor(kept).clone()
    for layer in (pair.plain, pair.layer):
        layer.zero_grad()
    pair.backward(ids())
    pair.check()
    assert torch.equal(torch.as_tensor(kept), before)


def test_a_hook_of_the_user_s_sees_dense_gradients() -> None:
    seen = []
    pair = Pair()
    pair.layer.weight.register_hook(lambda grad: seen.append(grad.layout))
    pair.layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.layout))
    pair.backward(ids())
    pair.check()
    assert seen == [torch.strided] * 2


def test_autograd_grad_gives_dense_gradients_that_can_be_derived() -> None:
    pair = Pair()
    at = ids()
    found = []
    for layer in (pair.plain, pair.layer):
        (plain,) = torch.autograd.grad(layer(at).pow(3).sum(), layer.weight)
        (first,) = torch.autograd.grad(layer(at).pow(3).sum(), layer.weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), layer.weight)
        first.square().sum()
        layer(at).pow(3).sum().backward(create_graph=True)
        found.append((plain, first, second, layer.weight.grad))
        layer.weight.grad = None
    for one, other in zip(*found, strict=True):
        assert one.layout == other.layout == torch.strided
        torch.testing.assert_close(one, other)


def test_backward_for_some_inputs() -> None:
    pair = Pair()
    at = ids()
    for layer in (pair.plain, pair.layer):
        layer(at).sum().backward(inputs=[layer.weight])
    pair.check()


def test_tied_to_an_output_layer() -> None:
    pair = Pair()
    at = ids(4)
    for _ in range(3):
        for layer in (pair.plain, pair.layer):
            (layer(at) @ layer.weight.T).square().sum().backward()
        pair.check()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_the_layer_are_plain(copied: Any) -> None:
    other = copied(Pair().layer)
    other(ids()).sum().backward()
    assert not other.weight.grad.is_sparse and not other.sparse


def early_hook(layer: nn.Module, hook: Any) -> Any:
    """One that was there before ours."""
    handle = layer.register_forward_hook(hook)
    layer._forward_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


HOOKS: list[Any] = [
    early_hook,
    lambda layer, hook: layer.register_forward_hook(hook),
    lambda layer, hook: layer.register_forward_pre_hook(lambda layer, args: hook(layer, args, None)),
    lambda layer, hook: nn.modules.module.register_module_forward_hook(hook),
]


@pytest.mark.parametrize("register", HOOKS, ids=["before ours", "after ours", "before forward", "of all layers"])
def test_copies_that_are_made_within_forward_are_plain(register: Any) -> None:
    pair = Pair()
    tied = nn.ModuleList([pair.layer, nn.Linear(WIDTH, TABLE, bias=False)])
    tied[1].weight = pair.layer.weight
    made: list[Any] = []

    def copied(layer: nn.Module, args: Any, output: Any) -> None:
        if layer is pair.layer and not made:
            made.append(None)
            made.append(copy.deepcopy(tied))

    handle = register(pair.layer, copied)
    pair.layer(ids())
    handle.remove()
    other, head = made[1]
    assert isinstance(other.weight, nn.Parameter) and other.weight is head.weight is not pair.layer.weight
    torch.testing.assert_close(other.weight, pair.layer.weight)
    other(ids()).sum().backward()
    assert not other.weight.grad.is_sparse and not other.sparse and not pair.layer.sparse
    pair.backward(ids())
    pair.check()


def test_error_in_forward_leaves_the_layer_as_it_is() -> None:
    pair = Pair()
    with pytest.raises(IndexError):
        pair.layer(torch.tensor([TABLE]))
    assert pair.layer.sparse is False


def interrupted(pair: Pair) -> None:
    """The layer's forward ends by an interrupt, which torch tells no hooks of."""

    def stop(layer: Any, args: Any) -> None:
        raise KeyboardInterrupt

    handle = pair.layer.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        pair.layer(ids())
    handle.remove()


def test_an_interrupted_forward_is_no_setting_of_the_users() -> None:
    pair = Pair()
    param = pair.layer.weight
    interrupted(pair)
    assert not profile_of(pair.layer, [[param]], torch.optim.SGD([param])).params[0].sparse
    assert pair.layer.sparse is False and pair.layer.weight is param
    interrupted(pair)
    pair.backward(ids())
    pair.check()
    interrupted(pair)
    pair.table.close()
    assert pair.layer.sparse is False and pair.layer.weight is param


def test_what_is_known_of_another_gradient_does_not_count() -> None:
    pair = Pair("dense")
    table, param = pair.table, pair.layer.weight
    pair.layer(torch.tensor([1, 2])).sum().backward()
    assert param.grad is not None
    param.grad.mul_(0.5).mul_(0.5)
    version = param.grad._version
    param.grad = torch.zeros_like(param)
    param.grad[7] = 1.0
    while param.grad._version < version:
        table.write(table.rows(), sparse=False)
    assert param.grad._version == version
    param.grad = None
    pair.layer(torch.tensor([5])).sum().backward()
    grad: Any = param.grad
    assert grad.abs().sum(1).nonzero().flatten().tolist() == [5]


def test_closing_leaves_everything_as_it_was() -> None:
    pair = Pair()
    pair.table.close()
    assert not pair.layer._forward_hooks and not pair.layer._forward_pre_hooks
    assert not pair.layer.weight._backward_hooks and not pair.layer.weight._post_accumulate_grad_hooks


def test_without_gradients_nothing_is_switched() -> None:
    pair = Pair()
    with torch.no_grad():
        pair.layer(ids())
    pair.layer.weight.requires_grad_(False)
    pair.layer(ids())
    assert pair.layer.sparse is False and pair.layer.weight.grad is None
