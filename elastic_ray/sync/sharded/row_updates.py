"""Rules for rows, carried out (torch).

Second owners make the same updates, and must come to the same bits, though the rows lie elsewhere in their memory. So
each kernel here rounds once: an addition that multiplies as well may or may not be fused, by the place of an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from elastic_ray.sync.sharded.rules import RowAdagrad, RowAdam, RowRule, RowSGD

_Rows = Mapping[str, Tensor]


def update_rows(
    rule: RowRule, tensors: Mapping[str, Tensor], places: Tensor, gradient: Tensor, *, lr: float, step: int
) -> None:
    """Update some rows in place.

    Args:
        rule: how.
        tensors: the table's ``weight`` and the rule's state, each [places, width].
        places: which rows, each once.
        gradient: theirs, [len(places), width].
        lr: learning rate.
        step: number of the update, from 1.
    """
    rows = {name: tensor.index_select(0, places) for name, tensor in tensors.items()}
    _RULES[type(rule)](rule, rows, gradient, lr, step)
    for name, tensor in tensors.items():
        tensor.index_copy_(0, places, rows[name])


def _sgd(rule: RowSGD, rows: _Rows, gradient: Tensor, lr: float, step: int) -> None:
    rows["weight"].sub_(gradient * lr)


def _adagrad(rule: RowAdagrad, rows: _Rows, gradient: Tensor, lr: float, step: int) -> None:
    rows["sum"].add_(gradient * gradient)
    rows["weight"].sub_((gradient * lr).div_(rows["sum"].sqrt().add_(rule.eps)))


def _adam(rule: RowAdam, rows: _Rows, gradient: Tensor, lr: float, step: int) -> None:
    first, second = rule.betas
    rows["exp_avg"].mul_(first).add_(gradient * (1.0 - first))
    rows["exp_avg_sq"].mul_(second).add_((gradient * gradient).mul_(1.0 - second))
    rate = lr * math.sqrt(1.0 - second**step) / (1.0 - first**step)
    rows["weight"].sub_((rows["exp_avg"] * rate).div_(rows["exp_avg_sq"].sqrt().add_(rule.eps)))


_RULES: dict[type[RowRule], Callable[[Any, _Rows, Tensor, float, int], None]] = {
    RowSGD: _sgd,
    RowAdagrad: _adagrad,
    RowAdam: _adam,
}


def summed(pieces: list[tuple[Tensor, Tensor]], width: int) -> tuple[Tensor, Tensor]:
    """Row gradients with each id once, in rising order; pieces are added one after the other.

    Args:
        pieces: ids [n] and gradients [n, width]; in one piece each id occurs once. At least one piece.
    """
    if len(pieces) == 1:
        return pieces[0]
    ids, where = torch.unique(torch.cat([each for each, _ in pieces]), return_inverse=True)
    total = torch.zeros(len(ids), width, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
    for at, (_, gradient) in zip(torch.split(where, [len(each) for each, _ in pieces]), pieces, strict=True):
        total.index_add_(0, at, gradient)
    return ids, total
