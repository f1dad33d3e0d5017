"""How parameters are laid out in flat buffers for reduction: equal on every rank, whatever order hooks fire in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

# As torch DDP: a small first bucket starts the communication early, later ones amortise its latency.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclasses.dataclass(slots=True)
class Bucket:
    """A flat buffer that holds the gradients of some parameters of one group, dtype and device.

    Attributes:
        index: position in the order of reduction.
        group: parameter group that the parameters belong to.
        params: the parameters, in the order of their ``views``.
        flat: the buffer, followed by ``tail`` extra elements.
        body: the buffer without its tail.
        views: one view of ``body`` for each parameter, in its shape.
        pending: gradients still missing in the present backward pass.
        holds_sum: whether ``body`` holds accumulated gradients of earlier micro-steps.
    """

    index: int
    group: int
    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    body: torch.Tensor
    views: list[torch.Tensor]
    pending: int = 0
    holds_sum: bool = False


def build_buckets(groups: Sequence[Sequence[torch.nn.Parameter]], tail: int) -> tuple[list[Bucket], torch.Tensor]:
    """Buckets in the order in which backward fills them (last parameters first), and the tail tensor.

    The tail carries control values with the last bucket's reduction where that is in float32 or float64; else it is a
    buffer of its own, to be reduced by itself.

    Args:
        groups: parameters of each parameter group, in the model's order.
        tail: number of control values.
    """
    order = [(index, p) for index, group in enumerate(groups) for p in group if p.requires_grad]
    cuts: list[tuple[int, list[torch.nn.Parameter]]] = []
    for kind in dict.fromkeys((index, p.dtype, p.device) for index, p in order):
        params = [p for index, p in reversed(order) if (index, p.dtype, p.device) == kind]
        cuts += [(kind[0], cut) for cut in _cut(params, first=not cuts)]
    if not cuts:
        raise ValueError("model must have at least one parameter that requires a gradient")
    buckets = []
    carries_tail = cuts[-1][1][0].dtype in (torch.float32, torch.float64)
    for index, (group, params) in enumerate(cuts):
        extra = tail if carries_tail and index == len(cuts) - 1 else 0
        buckets.append(_allocate(index, group, params, extra))
    last = buckets[-1]
    values = last.flat[last.body.numel() :] if carries_tail else torch.zeros(tail, device=last.flat.device)
    return buckets, values


def _cut(params: list[torch.nn.Parameter], *, first: bool) -> list[list[torch.nn.Parameter]]:
    cuts: list[list[torch.nn.Parameter]] = [[]]
    size, limit = 0, FIRST_BUCKET_BYTES if first else BUCKET_BYTES
    for p in params:
        nbytes = p.numel() * p.element_size()
        if cuts[-1] and size + nbytes > limit:
            cuts.append([])
            size, limit = 0, BUCKET_BYTES
        cuts[-1].append(p)
        size += nbytes
    return cuts


def _allocate(index: int, group: int, params: list[torch.nn.Parameter], extra: int) -> Bucket:
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(numel + extra, dtype=params[0].dtype, device=params[0].device)
    body = flat[:numel]
    views, offset = [], 0
    for p in params:
        views.append(body[offset : offset + p.numel()].view(p.shape))
        offset += p.numel()
    return Bucket(index=index, group=group, params=params, flat=flat, body=body, views=views)
